"""``--quantization int4``: 4-bit integer weights with a scale per output channel and group of inputs (W4A16)."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle

from minisgl_backends.kernels.device import packed_gemm_unsupported
from minisgl_backends.kernels.int4_weight import Int4Weight, quantize_groups, torch_int4_linear
from minisgl_backends.kernels.packed_matrix import TILE
from minisgl_backends.quantization.int4_checkpoint import CheckpointInt4Linear, Prepare
from minisgl_backends.quantization.int4_experts import CheckpointInt4Experts, Int4Experts
from minisgl_backends.quantization.requirements import (
    refuse_stacked_experts,
    stored_quantization,
    wrong_weights_message,
)
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization, Int4Format, int4_format
from minisgl_core.contracts.layer_methods import (
    ExpertsMethod,
    ExpertsSpec,
    LinearMethod,
    LinearPart,
    LinearSpec,
    PlainLinear,
)
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import LinearOp, Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.errors import ModelFormatError

logger = logging.getLogger(__name__)

_GROUPS = (128, 64, 32)
"""Group sizes for 16-bit checkpoints, which are quantized after loading: the first that divides the input size is used."""
_CHUNK = 1 << 22
"""Weights that are quantized at once, which bounds the temporary memory."""


class Int4(Quantization):
    """Loads AWQ, GPTQ and compressed-tensors checkpoints packed, and quantizes 16-bit ones after loading (round to nearest).

    On a GPU, kernels dequantize in registers: CUDA C++ on Hopper, Triton otherwise. On a CPU, each GEMM dequantizes panels of its
    weight.
    """

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        reasons, stored = [], stored_quantization(spec)
        if stored is not None:
            try:
                formats = [int4_format(stored, weights) for weights in stored.groups]
                if not formats or None in formats:
                    supported = "quant_method 'awq', 'gptq', 'compressed-tensors' of type 'int' with num_bits 4"
                    supported += ", 16-bit weights, and GGUF files"
                    reasons.append(wrong_weights_message(stored, "4-bit integers", supported))
            except ModelFormatError as error:
                reasons.append(str(error))
        if spec.device.type == "cuda":
            reasons += packed_gemm_unsupported(spec.device, spec.dtype)
        return reasons

    def __init__(self, spec: QuantizationSpec, ops: Ops) -> None:
        super().__init__(spec, ops)
        self._prepare_on_gpu: Callable[..., LinearOp] | None = None
        self._halves = cycle((0, 1))
        if spec.device.type == "cuda":
            from minisgl_backends.cuda.requirements import hopper_missing
            from minisgl_backends.cuda.small_m_gemm import StreamKWorkspace
            from minisgl_backends.kernels.split_k import SplitKWorkspace
            from minisgl_backends.quantization import int4_gpu

            stream_k_workspace = None if hopper_missing(spec.device, spec.dtype) else StreamKWorkspace(spec.device)
            self._prepare_on_gpu = partial(
                int4_gpu.prepare, workspace=SplitKWorkspace(spec.device), stream_k_workspace=stream_k_workspace
            )

    def _next_prepare(self) -> Prepare:
        """Return the function that prepares the next layer, in the order in which layers run.

        On Hopper GPUs, GEMMs that follow each other take different halves of an SM.
        """
        return (
            torch_int4_linear
            if self._prepare_on_gpu is None
            else partial(self._prepare_on_gpu, half=next(self._halves))
        )

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Return the method for a layer of a 16-bit checkpoint, or of one with 4-bit integers.

        Raises:
            ModelFormatError: the checkpoint quantizes some parts of a fused layer only, or in several ways.
        """
        stored = stored_quantization(self.spec)
        if stored is None:
            group = next((size for size in _GROUPS if spec.in_features % size == 0), None)
            if group is None:
                logger.warning(
                    "%s is not quantized: int4 needs a multiple of 32 inputs, not %d", spec.name, spec.in_features
                )
                return super().linear(spec)
            return Int4Linear(spec, self.ops, group, self._next_prepare())
        found = _format_of(stored, spec.name, spec.parts)
        return super().linear(spec) if found is None else CheckpointInt4Linear(spec, found, self._next_prepare())

    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        """Return the method of one layer's experts, of a 16-bit checkpoint or of one with 4-bit integers.

        Raises:
            ModelFormatError: the checkpoint quantizes some experts of the layer only, or in several ways.
            ProviderUnsupportedError: the checkpoint stores all experts in one tensor.
        """
        refuse_stacked_experts(spec, "int4")
        stored = stored_quantization(self.spec)
        if stored is None:
            return Int4Experts(spec, kernel)
        experts = range(spec.moe.num_experts)
        parts = [part for each in experts for part in (*spec.gate_up_parts(each), spec.down_part(each))]
        found = _format_of(stored, spec.name, parts)
        return super().experts(spec, kernel) if found is None else CheckpointInt4Experts(spec, kernel, found)


class Int4Linear(PlainLinear):
    """A weight of a 16-bit checkpoint, quantized after loading: symmetric, rounded to nearest."""

    def __init__(self, spec: LinearSpec, ops: Ops, group: int, prepare: Prepare) -> None:
        super().__init__(spec, ops)
        self._group, self._prepare = group, prepare

    def precompile(self) -> None:
        """Do nothing: the kernels are not those of `ops`."""

    def prepare(self) -> LinearOp:
        spec = self.spec
        sizes = spec.out_features, spec.in_features
        packed = Int4Weight.empty(*sizes, self._group, spec.dtype, spec.device, gated=spec.gated)
        step = max(TILE, _CHUNK // spec.in_features)
        row = 0
        for part in spec.parts:
            for start in range(row, row + part.rows.size, step):
                weight = self.weight[start : min(start + step, row + part.rows.size)].float()
                codes, scales = quantize_groups(weight, self._group, spec.dtype)
                rows = packed.rows_of(start, len(weight))
                packed.scales[: scales.shape[1], rows] = scales.t()
                packed.store(rows, codes)
            row += part.rows.size
        return self._prepare(packed, self.bias)


def _format_of(checkpoint: CheckpointQuantization, name: str, parts: Iterable[LinearPart]) -> Int4Format | None:
    """Return the format of all parts of a layer; None if they are not quantized."""
    weights = [checkpoint.weights_of(part.name) for part in parts]
    kinds = {None if each is None else int4_format(checkpoint, each) for each in weights}
    if len(kinds) > 1:
        raise ModelFormatError(f"config: quantization_config quantizes the parts of {name} in different ways")
    return kinds.pop()
