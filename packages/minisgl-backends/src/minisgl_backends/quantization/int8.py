"""``--quantization int8``: 8-bit integer weights with a scale per output channel, and activations in 8 bits (W8A8)."""

from dataclasses import replace

import torch

from minisgl_backends.native import library
from minisgl_backends.quantization.fp8_checkpoint import CheckpointLinear
from minisgl_backends.quantization.gguf_cpu import CpuLinearMethod
from minisgl_backends.quantization.gguf_types import TYPES
from minisgl_backends.quantization.requirements import stored_quantization, wrong_weights_message
from minisgl_backends.requirements import triton_unsupported
from minisgl_core.contracts.checkpoint_quantization import is_int8
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import LinearMethod, LinearPart, LinearSpec, PlainLinear
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.ops.norm import silu_and_mul
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import ModelFormatError
from minisgl_core.utils.fp8 import LEAST_SCALE

_CHUNK = 1 << 20
"""Weights that are quantized or widened at once, which bounds the temporary memory."""
_BLOCK = 32
"""Inputs that the C kernels quantize with one scale."""


class Int8(Quantization):
    """Loads compressed-tensors checkpoints in W8A8, and quantizes 16-bit checkpoints after loading (round to nearest).

    Activations are quantized at run time, per token, or per 32 inputs by the C kernels of CPUs. Static scales of activations
    are ignored.
    """

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        reasons, stored = [], stored_quantization(spec)
        if stored is not None:
            try:
                if not stored.groups or not all(is_int8(stored, each) for each in stored.groups):
                    supported = "quant_method 'compressed-tensors' of type 'int' with num_bits 8, 16-bit weights, and GGUF files"
                    reasons.append(wrong_weights_message(stored, "8-bit integers", supported))
            except ModelFormatError as error:
                reasons.append(str(error))
        if spec.num_experts:
            reasons.append("it does not support experts")
        if spec.device.type == "cuda":
            reasons += triton_unsupported(spec.device)
        return reasons

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Return the method for a layer of a 16-bit checkpoint, or of one with 8-bit integers.

        Raises:
            ModelFormatError: the checkpoint quantizes some parts of a fused layer only.
        """
        stored = stored_quantization(self.spec)
        if stored is None:
            return Int8Linear(spec, self.ops)
        quantized = {stored.weights_of(part.name) is not None for part in spec.parts}
        if len(quantized) > 1:
            raise ModelFormatError(f"config: quantization_config quantizes the parts of {spec.name} in different ways")
        return CheckpointInt8Linear(spec) if True in quantized else super().linear(spec)


class Int8Linear(PlainLinear):
    """A weight of a 16-bit checkpoint, quantized after loading: symmetric, rounded to nearest."""

    def precompile(self) -> None:
        """Do nothing: the kernels are not those of `ops`."""

    def prepare(self) -> LinearOp:
        codes = torch.empty_like(self.weight, dtype=torch.int8)
        scales = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
        step = max(1, _CHUNK // max(codes.shape[1], 1))
        for start in range(0, len(codes), step):
            part = slice(start, start + step)
            codes[part], scales[part] = quantize_rows(self.weight[part].float())
        self.weight = self.weight.new_empty(0)
        return operation(self.spec, codes, scales, self.bias)


class CheckpointInt8Linear(CheckpointLinear):
    """A linear layer of a checkpoint with 8-bit integers."""

    weight_dtype = torch.int8

    def targets(self) -> Targets:
        """Yield ``NAME.weight``, ``NAME.weight_scale`` and ``NAME.bias`` of every part; activation scales are not used."""
        yield from super().targets()
        for name in dict.fromkeys(part.name for part in self.spec.parts):
            for kind, dtype in (("input_scale", torch.float32), ("input_zero_point", torch.int8)):
                yield f"{name}.{kind}", WeightTarget(torch.empty(1, dtype=dtype), optional=True, broadcast=True)

    def prepare(self) -> LinearOp:
        """Pass the weight to the kernel of the device."""
        return operation(self.spec, self._matrix.values, self._matrix.scales, self._bias)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of x, float32 [M, K], -127 to 127 in int8, and a scale per row, [M]."""
    scales = (x.abs().amax(1) / 127 if x.shape[1] else x.new_zeros(len(x))).clamp_min_(LEAST_SCALE)
    return (x / scales[:, None]).round_().to(torch.int8), scales


def operation(spec: LinearSpec, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
    """Return the layer's operation for codes, int8 [out_features, in_features], and scales, float32 [out_features]."""
    if codes.is_cuda:
        from minisgl_backends.kernels.int8_gemm import Int8Gemm

        return Int8Gemm(codes, scales, bias, gated=spec.gated)
    is_packed = codes.numel() and codes.shape[1] % _BLOCK == 0 and not library.unsupported(spec.device, spec.dtype)
    gemm = _native(spec, codes) if is_packed else _torch(codes)
    gated = spec.gated

    def linear(x: torch.Tensor) -> torch.Tensor:
        # The C kernel rounds to x's dtype before the scales and the bias, which round again. The Triton kernel rounds once.
        out = (gemm(x).float() * scales).to(x.dtype)
        out = out if bias is None else out + bias
        return silu_and_mul(out) if gated else out

    return linear


def _native(spec: LinearSpec, codes: torch.Tensor) -> LinearOp:
    """Return a GEMM of the C kernels: they take the codes as blocks of GGML's Q8_0 whose scales are all 1."""
    rows, columns = Shard.whole(len(codes)), Shard.whole(codes.shape[1])
    part = LinearPart(spec.name, rows)
    method = CpuLinearMethod(replace(spec, parts=(part,), columns=columns, bias=False, gated=False), [TYPES["Q8_0"]])
    blocks = method.blocks[0].view(len(codes), -1, _BLOCK + 2)
    blocks[:, :, :2] = torch.ones(1, dtype=torch.float16).view(torch.int8)
    blocks[:, :, 2:] = codes.view(len(codes), -1, _BLOCK)
    return method.prepare()


def _torch(codes: torch.Tensor) -> LinearOp:
    """Return a GEMM in float32 by panels of the codes: exact up to 1,040 inputs, and slow. It serves as a reference, too."""
    step = max(1, _CHUNK // max(codes.shape[1], 1))

    def gemm(x: torch.Tensor) -> torch.Tensor:
        rows, scales = quantize_rows(x.float().reshape(-1, codes.shape[1]))
        wide = rows.float()
        parts = [wide @ panel.float().T for panel in torch.split(codes, step)]
        return (torch.cat(parts, 1) * scales[:, None]).view(*x.shape[:-1], len(codes))

    return gemm
