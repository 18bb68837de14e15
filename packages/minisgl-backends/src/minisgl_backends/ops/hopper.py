"""GEMMs for Hopper GPUs in CUDA C++, and Triton's norms and rotary embedding launched with PDL between them."""

import torch

from minisgl_backends.cuda.gemm_tiling import worthwhile_rows
from minisgl_backends.cuda.requirements import hopper_missing
from minisgl_backends.ops.triton_base import dense
from minisgl_backends.ops.triton_linear import TritonLinear
from minisgl_backends.ops.triton_ops import TritonNorm, TritonRotary
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.utils.fp8 import FP8


class HopperOps(TritonLinear, TritonNorm, TritonRotary):
    """Small-M GEMMs at memory bandwidth, and a large GEMM of gate and up with the activation in its epilogue.

    The GEMMs use programmatic dependent launch (PDL): a kernel may prefetch its weights while the kernel before it ends. This
    needs PDL in the kernels between the GEMMs too, so this provider also has the roles norm and rotary, and the activations. No
    kernel of a step may write weights.
    """

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        if device.type != "cuda":
            return hopper_missing(device, dtype)
        return [*super().unsupported(device, dtype), *hopper_missing(device, dtype)]

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.cuda import gated_gemm, small_m_gemm

        self._hopper_gated_gemm = gated_gemm
        self._hopper_small_m_gemm = small_m_gemm
        self._stream_k_workspace = small_m_gemm.StreamKWorkspace(device)
        self._max_small_m_rows = 0

    def uses_pdl(self, num_rows: int) -> bool:
        """Return True if GEMMs over `num_rows` tokens run in the small-M kernel, which launches with PDL."""
        return num_rows <= self._max_small_m_rows

    def precompile(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
        """Start compiling, while weights are loaded."""
        if self._hopper_small_m_gemm.supports_weight(weight, bias, gated=gated):
            row_sizes = self._row_sizes(weight, gated=gated)
            self._hopper_small_m_gemm.compile_variants(weight, bias, gated=gated, row_sizes=row_sizes)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        return self._with_hopper_small_m(super().prepare_linear(weight, bias), weight, bias, gated=False)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        fallback = self._with_hopper_small_m(super().prepare_gated(weight, bias), weight, bias, gated=True)
        if not self._hopper_gated_gemm.supports_weight(weight, bias):
            return fallback
        large = self._hopper_gated_gemm.HopperGatedGemm(weight)
        return lambda x: large(x) if x.dim() == 2 and large.supports_input(x) else fallback(x)

    def prepare_fp8_linear(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        fallback = super().prepare_fp8_linear(weight, scales, bias)
        return self._with_hopper_small_m(fallback, weight, bias, gated=False, scales=scales)

    def prepare_fp8_gated(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        fallback = super().prepare_fp8_gated(weight, scales, bias)
        return self._with_hopper_small_m(fallback, weight, bias, gated=True, scales=scales)

    def _row_sizes(self, weight: torch.Tensor, *, gated: bool) -> list[int]:
        if weight.dtype == FP8:  # faster than torch._scaled_mm for all of them
            return list(self._hopper_small_m_gemm.ROW_SIZES)
        max_rows = worthwhile_rows(*weight.shape, gated=gated)
        return [rows for rows in self._hopper_small_m_gemm.ROW_SIZES if rows <= max_rows]

    def _with_hopper_small_m(
        self,
        fallback: LinearOp,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool,
        scales: torch.Tensor | None = None,
    ) -> LinearOp:
        if not self._hopper_small_m_gemm.supports_weight(weight, bias, gated=gated):
            return fallback
        row_sizes = self._row_sizes(weight, gated=gated)
        self._max_small_m_rows = max(self._max_small_m_rows, *row_sizes)
        small_m = self._hopper_small_m_gemm.HopperSmallMGemm(
            weight, bias, self._stream_k_workspace, scales=scales, gated=gated, row_sizes=row_sizes
        )
        quantize_rows = self._quantize.quantize_rows
        gemm = small_m if scales is None else lambda x: small_m(*quantize_rows(dense(x), pdl=self.uses_pdl(len(x))))
        return lambda x: gemm(x) if x.dim() == 2 and small_m.supports_input(x) else fallback(x)
