"""GEMMs for Hopper GPUs in CUDA C++, and Triton's norms and rotary embedding launched with PDL between them."""

from __future__ import annotations

import torch

from minisgl_backends.cuda.gemm_tiling import worthwhile_rows
from minisgl_backends.cuda.requirements import hopper_missing
from minisgl_backends.ops.triton_linear import TritonLinear
from minisgl_backends.ops.triton_ops import TritonNorm, TritonRotary
from minisgl_core.contracts.ops import LinearOp


class HopperOps(TritonLinear, TritonNorm, TritonRotary):
    """Small-M GEMMs at memory bandwidth, and a GEMM of many tokens with the activation in its epilogue.

    They use programmatic dependent launch, as do the norms, activations and rotary embedding between them, which are roles of
    this provider for that reason. A kernel may read its weights while the kernel before it ends, so that one must write none.
    """

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Needs a Hopper GPU, bfloat16, and what compiles CUDA C++."""
        if device.type != "cuda":
            return hopper_missing(device, dtype)
        return [*super().unsupported(device, dtype), *hopper_missing(device, dtype)]

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.cuda import gated_gemm, small_m_gemm

        self._gated = gated_gemm
        self._product, self._stream_scratch = small_m_gemm, small_m_gemm.StreamKWorkspace(device)
        self._most_rows = 0

    def overlaps(self, num_rows: int) -> bool:
        """Return whether the GEMMs of so many tokens are its own."""
        return num_rows <= self._most_rows

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `LinearOps.prepare_linear`."""
        return self._with_product(super().prepare_linear(weight, bias), weight, bias, gated=False)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `LinearOps.prepare_gated`."""
        few = self._with_product(super().prepare_gated(weight, bias), weight, bias, gated=True)
        if not self._gated.fits(weight, bias):
            return few
        many = self._gated.HopperGatedGemm(weight)
        return lambda x: many(x) if x.dim() == 2 and many.takes(x) else few(x)

    def _with_product(
        self, other: LinearOp, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
    ) -> LinearOp:
        if not self._product.fits(weight, bias, gated=gated):
            return other
        max_rows = worthwhile_rows(*weight.shape, gated=gated)
        self._most_rows = max(self._most_rows, max_rows)
        row_sizes = [rows for rows in self._product.ROW_SIZES if rows <= max_rows]
        own = self._product.HopperSmallMGemm(weight, bias, self._stream_scratch, gated=gated, row_sizes=row_sizes)
        return lambda x: own(x) if x.dim() == 2 and own.takes(x) else other(x)
