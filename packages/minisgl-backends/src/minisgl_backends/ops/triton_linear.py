"""GEMMs for GPUs: small-M GEMMs in Triton, larger ones by cuBLAS."""

from contextlib import AbstractContextManager
from functools import partial

import torch

from minisgl_backends.cuda.cublaslt import new_tuner
from minisgl_backends.ops.triton_base import TritonProvider, dense
from minisgl_core.contracts.ops import LinearOp, LinearOps


class TritonLinear(TritonProvider, LinearOps):
    """Small-M GEMMs with fused activation, which read weights faster than cuBLAS. Larger GEMMs are cuBLAS's; see `GemmTuner`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.kernels import quantize, small_m_gemm, split_k

        self._small_m_gemm, self._quantize = small_m_gemm, quantize
        self._workspace = split_k.SplitKWorkspace(device)
        self._tuner = new_tuner(device, dtype)

    def tuning(self) -> AbstractContextManager[None]:
        return super().tuning() if self._tuner is None else self._tuner.tuning()

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        tuner, fallback = self._tuner, super().prepare_linear(weight, bias)
        if tuner is not None and bias is None and weight.dtype == self.dtype and weight.is_contiguous():
            fallback = partial(tuner.gemm, weight=weight)
        return self._with_small_m(fallback, weight, bias)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        # Not the prepare_linear of a subclass: HopperOps would also compile ungated small-M kernels, which would never run, since
        # its gated ones cover the same numbers of rows.
        gate_up, silu_and_mul = TritonLinear.prepare_linear(self, weight, bias), self.silu_and_mul
        return self._with_small_m(lambda x: silu_and_mul(gate_up(x)), weight, bias, gated=True)

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._quantize.quantize_rows(dense(x))

    def prepare_fp8_linear(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        prepare = self._fp8_gemm if weight.is_cuda else super().prepare_fp8_linear
        fallback = prepare(weight, scales, bias)
        return self._with_small_m(fallback, weight, bias, scales=scales)

    def prepare_fp8_gated(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        gate_up, silu_and_mul = TritonLinear.prepare_fp8_linear(self, weight, scales, bias), self.silu_and_mul
        return self._with_small_m(lambda x: silu_and_mul(gate_up(x)), weight, bias, gated=True, scales=scales)

    def _fp8_gemm(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Return the FP8 GEMM of torch."""
        right, right_scales, quantize_rows = weight.t(), scales[None], self._quantize.quantize_rows

        def gemm(x: torch.Tensor) -> torch.Tensor:
            x_q, x_scales = quantize_rows(x)
            out: torch.Tensor = torch._scaled_mm(
                x_q, right, x_scales, right_scales, out_dtype=x.dtype, use_fast_accum=True
            )
            return out if bias is None else out.add_(bias)  # not fused: cuBLAS takes no bias with some shapes

        return gemm

    def _with_small_m(
        self,
        fallback: LinearOp,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
        scales: torch.Tensor | None = None,
    ) -> LinearOp:
        """Return a GEMM of [..., in] by the small-M kernel for few rows, and by `fallback` for more.

        An FP8 weight has `scales`. Its small-M kernel writes bfloat16 only.
        """
        is_supported = scales is None or self.dtype == torch.bfloat16
        if not is_supported or not self._small_m_gemm.supports_weight(weight):
            return _flatten_batch_dims(fallback)
        max_rows, quantize_rows = self._small_m_gemm.MAX_ROWS, self._quantize.quantize_rows
        gemm = self._small_m_gemm.SmallMGemm(weight, bias, self._workspace, gated=gated, scales=scales)
        small_m = gemm if scales is None else lambda x: gemm(*quantize_rows(x))
        return _flatten_batch_dims(lambda x: small_m(x) if len(x) <= max_rows else fallback(x))


def _flatten_batch_dims(gemm: LinearOp) -> LinearOp:
    """Return a GEMM that accepts [..., in], from one that accepts [M, in]."""

    def flattened(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2 and x.stride(1) == 1:
            return gemm(x)
        out = gemm(dense(x.reshape(-1, x.shape[-1])))
        return out.reshape(*x.shape[:-1], out.shape[-1])

    return flattened
