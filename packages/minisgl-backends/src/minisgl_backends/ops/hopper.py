"""Triton's kernels, and for Hopper GPUs products in CUDA C++: of few rows, and with an activation of many."""

from __future__ import annotations

import torch

from minisgl_backends.cuda.cut import worthwhile_rows
from minisgl_backends.cuda.requirements import hopper_missing
from minisgl_backends.ops.triton_ops import TritonOps
from minisgl_core.contracts.ops import LinearOp


class HopperOps(TritonOps):
    """`TritonOps`, with products of few rows that read weights as fast as memory gives them.

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
        from minisgl_backends.cuda import gated, product

        self._gated = gated
        self._product, self._stream_scratch = product, product.StreamScratch(device)
        self._most_rows = 0

    def overlaps(self, num_rows: int) -> bool:
        """Where products in between are its own."""
        return num_rows <= self._most_rows

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_linear`."""
        return self._with_product(super().prepare_linear(weight, bias), weight, bias, gated=False)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_gated`."""
        few = self._with_product(super().prepare_gated(weight, bias), weight, bias, gated=True)
        if not self._gated.fits(weight, bias):
            return few
        many = self._gated.GatedProduct(weight)
        return lambda x: many(x) if x.dim() == 2 and many.takes(x) else few(x)

    def _with_product(
        self, other: LinearOp, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
    ) -> LinearOp:
        if not self._product.fits(weight, bias, gated=gated):
            return other
        max_rows = worthwhile_rows(*weight.shape, gated=gated)
        self._most_rows = max(self._most_rows, max_rows)
        row_sizes = [rows for rows in self._product.ROW_SIZES if rows <= max_rows]
        own = self._product.HopperProduct(weight, bias, self._stream_scratch, gated=gated, row_sizes=row_sizes)
        return lambda x: own(x) if x.dim() == 2 and own.takes(x) else other(x)
