"""``--quantization fp8``: float8 weights with a scale per output channel, and float8 activations with a scale per token."""

import logging
from typing import ClassVar

import torch

from minisgl_backends.quantization.fp8_checkpoint import CheckpointFp8Experts, CheckpointFp8Linear
from minisgl_backends.quantization.requirements import (
    refuse_stacked_experts,
    stored_quantization,
    wrong_weights_message,
)
from minisgl_backends.requirements import capability_missing, dtype_unsupported
from minisgl_core.contracts.checkpoint_quantization import block_shape
from minisgl_core.contracts.layer_methods import (
    ExpertsMethod,
    ExpertsOp,
    ExpertsSpec,
    LinearMethod,
    LinearSpec,
    PlainExperts,
    PlainLinear,
)
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import LinearOp, LinearOps, Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.utils.fp8 import FP8

logger = logging.getLogger(__name__)

_ROWS = 2048
"""Rows of a weight that are quantized at once, which bounds the temporary memory."""
_MULTIPLE = 16
"""Both dimensions of a quantized weight are multiples of this number."""


class Fp8(Quantization):
    """Quantizes a 16-bit checkpoint at load, and loads an FP8 checkpoint from its own values and scales.

    Activations are quantized per token at run time, so no calibration is needed. A weight whose dimensions are not multiples of
    16 keeps the model's dtype, as do the layers that an FP8 checkpoint leaves unquantized. On a CPU, each matmul dequantizes its
    weight to float32, which serves tests and measurements of accuracy.
    """

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        reasons, stored = [], stored_quantization(spec)
        if stored is not None and not stored.is_float8:
            supported = "quant_method 'fp8', 'compressed-tensors' of type 'float' with num_bits 8, 16-bit weights, and GGUF files"
            reasons.append(wrong_weights_message(stored, "float8", supported))
        if spec.device.type == "cuda" and torch.cuda.is_available():
            reasons += capability_missing(spec.device, (8, 9), "a float8 matmul")
            reasons += dtype_unsupported(spec.dtype, (torch.bfloat16,))
        return reasons

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Return the method for a layer of a 16-bit checkpoint, or of an FP8 checkpoint."""
        stored, names = stored_quantization(self.spec), [part.name for part in spec.parts]
        if (stored is not None and stored.has_unquantized(names)) or not _has_supported_shape(spec):
            return super().linear(spec)
        if stored is None:
            return Fp8Linear(spec, self.ops)
        return CheckpointFp8Linear(spec, self.ops, block_shape(stored.weights_of(names[0]) or {}))

    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        """Return the method for a layer's experts. Either all experts of a layer are quantized or none is.

        Raises:
            ProviderUnsupportedError: the checkpoint stores all experts in one tensor.
        """
        refuse_stacked_experts(spec, "fp8")
        stored = stored_quantization(self.spec)
        names = [part.name for part in (*spec.gate_up_parts(0), spec.down_part(0))]
        if stored is None:
            return Fp8Experts(spec, kernel, self.ops)
        if stored.has_unquantized(names):
            return super().experts(spec, kernel)
        return CheckpointFp8Experts(spec, kernel, block_shape(stored.weights_of(names[-1]) or {}))


class Fp8Linear(PlainLinear):
    """A weight of a 16-bit checkpoint, quantized after loading."""

    def precompile(self) -> None:
        """Start to compile for the quantized weight."""
        self.ops.linear.precompile(torch.empty_like(self.weight, dtype=FP8), self.bias, gated=self.spec.gated)

    def prepare(self) -> LinearOp:
        """Quantize; see `LinearOps.prepare_fp8_linear` and `LinearOps.prepare_fp8_gated`."""
        kernels = self.ops.linear
        values, scales = quantize(self.weight, kernels)
        make = kernels.prepare_fp8_gated if self.spec.gated else kernels.prepare_fp8_linear
        return make(values, scales, self.bias)


class Fp8Experts(PlainExperts):
    """Experts of a 16-bit checkpoint, quantized after loading."""

    weight_dtype: ClassVar[torch.dtype | None] = FP8

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel], ops: Ops) -> None:
        super().__init__(spec, kernel)
        self._kernels = ops.linear

    def prepare(self) -> ExpertsOp:
        """Quantize each expert's weights, with a scale per row."""
        (gate_up, gate_up_scales), (down, down_scales) = self._quantize(self.gate_up), self._quantize(self.down)
        return self.operation(gate_up, down, gate_up_scales, down_scales)

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = quantize(weight.flatten(0, 1), self._kernels)
        return values.view_as(weight), scales.view(weight.shape[:2])


def quantize(weight: torch.Tensor, kernels: LinearOps) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float8 values of `weight`, [out, in], and a scale per row, float32 [out]."""
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), _ROWS):
        part = slice(start, start + _ROWS)
        part_values, part_scales = kernels.quantize_rows(weight[part])
        values[part].copy_(part_values)
        scales[part].copy_(part_scales)
    return values, scales.view(-1)


def _has_supported_shape(spec: LinearSpec) -> bool:
    sides = spec.out_features, spec.in_features
    if all(size % _MULTIPLE == 0 for size in sides):
        return True
    logger.warning(
        "%s is not quantized: on this rank it is %d by %d, and fp8 needs multiples of %d", spec.name, *sides, _MULTIPLE
    )
    return False
