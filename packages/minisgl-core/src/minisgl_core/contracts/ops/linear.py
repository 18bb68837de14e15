"""Contract of the linear role: GEMMs. See the package for the shape legend."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from minisgl_core.contracts.ops.norm import silu_and_mul
from minisgl_core.contracts.ops.provider import OpsProvider
from minisgl_core.utils.fp8 import FP8_MAX, LEAST_SCALE, to_fp8

LinearOp = Callable[[torch.Tensor], torch.Tensor]
"""Prepared GEMM: a function of x [..., in] that returns [..., out]."""


class LinearOps(OpsProvider):
    """GEMMs of linear layers, in the model's dtype and in FP8. The activation of a gated MLP may be fused.

    Each ``prepare_*`` method is called once per weight, after loading. It may return a function that holds a copy in another
    layout instead of the weight. The function does not modify its input.
    """

    def precompile(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
        """Start to compile the kernels for a weight of this shape and dtype, which is not loaded yet; ``prepare_*`` follows."""

    def tuning(self) -> AbstractContextManager[None]:
        """Return a context in which the prepared functions may measure kernels for the shapes that they are called with.

        The engine runs the model in it before it captures piecewise CUDA graphs of the same shapes. Outside of it, no call
        measures.
        """
        return nullcontext()

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Return ``x -> x @ weight.T + bias``.

        Args:
            weight: [out, in].
            bias: [out] or None.
        """
        return lambda x: F.linear(x, weight, bias)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Return ``x -> silu_and_mul(x @ weight.T + bias)``, for a gated MLP; see `NormOps.silu_and_mul`.

        Args:
            weight: gate rows, then up rows, [2 * I, in].
            bias: [2 * I] or None.
        """
        gate_up = self.prepare_linear(weight, bias)
        return lambda x: silu_and_mul(gate_up(x))

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize each row to float8_e4m3fn, with the scale that maps its largest magnitude to the largest float8 number.

        Args:
            x: [T, in], with any row stride.

        Returns:
            The quantized rows `x_q`, float8_e4m3fn [T, in], contiguous, and their scales `x_scales`, float32 [T, 1].
        """
        scales = (x.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp_min(LEAST_SCALE)
        return to_fp8(x, scales), scales

    def prepare_fp8_linear(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Return ``x -> (x_q @ weight.T) * x_scales * scales + bias``, with x_q and x_scales from `quantize_rows`.

        Args:
            weight: float8_e4m3fn [out, in], contiguous; both dimensions are multiples of 16.
            scales: one per output channel, float32 [out], contiguous.
            bias: [out] or None.
        """

        def linear(x: torch.Tensor) -> torch.Tensor:
            x_q, x_scales = self.quantize_rows(x)
            out = F.linear(x_q.float(), weight.float()) * x_scales * scales
            return (out if bias is None else out + bias).to(x.dtype)

        return linear

    def prepare_fp8_gated(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Return `prepare_fp8_linear`, followed by `NormOps.silu_and_mul`.

        Args:
            weight: gate rows, then up rows, float8_e4m3fn [2 * I, in], contiguous; both dimensions are multiples of 16.
            scales: one per output channel, float32 [2 * I], contiguous.
            bias: [2 * I] or None.
        """
        gate_up = self.prepare_fp8_linear(weight, scales, bias)
        return lambda x: silu_and_mul(gate_up(x))
