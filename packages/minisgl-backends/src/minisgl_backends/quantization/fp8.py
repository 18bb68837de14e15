"""``--quantization fp8``: weights in float8 with a scale an output channel, activations in float8 with a scale a token."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import ClassVar

import torch

from minisgl_core.contracts.moe import ExpertWeights, MoeKernel
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.quantization import ExpertsOp, Quantization, QuantizationSpec
from minisgl_core.fp8 import FP8

logger = logging.getLogger(__name__)

_ROWS = 2048
"""Rows of a matrix that are quantised at once, which bounds what that takes besides the matrix."""
_MULTIPLE = 16
"""What both sides of a matrix must be multiples of."""


class Fp8(Quantization):
    """Scales are found at load and for each token: nothing has to be calibrated.

    A matrix whose sides are no multiples of 16 stays as it is. On a CPU, matrices become float32 again in each product: that
    is for tests, and to see what is lost.
    """

    expert_dtype: ClassVar[torch.dtype | None] = FP8

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        """A GPU without float8, or another dtype than its products have."""
        reasons = []
        if spec.device.type == "cuda" and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(spec.device)
            if capability < (8, 9):
                has = ".".join(map(str, capability))
                reasons.append(f"products in float8 need compute capability 8.9 or later, and this GPU has {has}")
            if spec.dtype != torch.bfloat16:
                name = str(spec.dtype).removeprefix("torch.")
                reasons.append(f"its products have results in bfloat16, not {name} (--dtype bfloat16)")
        return reasons

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Quantise; see `LinearOps.prepare_fp8_linear`."""
        if not _fits(weight):
            return super().prepare_linear(weight, bias)
        return self.ops.linear.prepare_fp8_linear(*self._quantize(weight), bias)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Quantise; see `LinearOps.prepare_fp8_gated`."""
        if not _fits(weight):
            return super().prepare_gated(weight, bias)
        return self.ops.linear.prepare_fp8_gated(*self._quantize(weight), bias)

    def prepare_experts(self, kernel: MoeKernel, weights: ExpertWeights) -> ExpertsOp:
        """Quantize each expert's matrices, a scale per row."""
        gate_up, gate_up_scales = self._quantize_experts(weights.gate_up)
        down, down_scales = self._quantize_experts(weights.down)
        quantized = replace(weights, gate_up=gate_up, down=down, gate_up_scales=gate_up_scales, down_scales=down_scales)
        return super().prepare_experts(kernel, quantized)

    def _quantize_experts(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self._quantize(weight.flatten(0, 1))
        return codes.view_as(weight), scales.view(weight.shape[:2])

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float8 like `weight`, and the scale of each row, float32 [out]."""
        codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        for start in range(0, len(weight), _ROWS):
            part = slice(start, start + _ROWS)
            found = self.ops.linear.quantize_rows(weight[part])
            codes[part].copy_(found[0])
            scales[part].copy_(found[1])
        return codes, scales.view(-1)


def _fits(weight: torch.Tensor) -> bool:
    if all(size % _MULTIPLE == 0 for size in weight.shape):
        return True
    logger.warning("a matrix of %d by %d stays as it is: fp8 takes multiples of %d", *weight.shape, _MULTIPLE)
    return False
