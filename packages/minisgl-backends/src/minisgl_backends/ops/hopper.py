"""Triton's kernels, and products of few rows in CUDA C++ for Hopper GPUs."""

from __future__ import annotations

import torch

from minisgl_backends.cuda.requirements import hopper_missing
from minisgl_backends.ops.triton_ops import TritonOps
from minisgl_core.contracts.ops import LinearOp


class HopperOps(TritonOps):
    """`TritonOps`, with products of up to 160 rows that read weights as fast as memory gives them.

    They, and the norms between them, begin to do so while the kernel in front of them ends; so what that kernel writes can be
    no weight.
    """

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Needs a Hopper GPU, bfloat16, and what compiles CUDA C++."""
        if device.type != "cuda":
            return hopper_missing(device, dtype)
        return [*super().unsupported(device, dtype), *hopper_missing(device, dtype)]

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.cuda import product

        self._product, self._stream_scratch = product, product.StreamScratch(device)

    def overlaps(self, num_rows: int) -> bool:
        """Where the products in between are its own."""
        return num_rows <= self._product.MAX_ROWS

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_linear`."""
        return self._with_product(super().prepare_linear(weight, bias), weight, bias, gated=False)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_gated`."""
        return self._with_product(super().prepare_gated(weight, bias), weight, bias, gated=True)

    def _with_product(
        self, other: LinearOp, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
    ) -> LinearOp:
        if not self._product.fits(weight, bias, gated=gated):
            return other
        own = self._product.HopperProduct(weight, bias, self._stream_scratch, gated=gated)
        return lambda x: own(x) if x.dim() == 2 and own.takes(x) else other(x)
