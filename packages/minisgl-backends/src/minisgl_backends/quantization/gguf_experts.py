"""Packed experts of GGUF files on CPUs, for the C kernels."""

import torch

from minisgl_backends.moe.torch_kernel import sum_over_experts
from minisgl_backends.quantization.gguf_cpu import CpuLinearMethod
from minisgl_backends.quantization.gguf_types import GgmlType
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsOp, ExpertsSpec, LinearPart, LinearSpec
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.shard import Shard


class CpuExperts(ExpertsMethod):
    """The file's blocks of a layer's experts. Each expert is two layers: gate and up with the activation, and down."""

    @staticmethod
    def supports(spec: ExpertsSpec) -> bool:
        """Return True if the kernels have the experts' activation, and the file has a matrix per expert without biases."""
        moe = spec.moe
        return moe.activation == "silu" and moe.swiglu_limit is None and not moe.has_bias and not spec.interleaved

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel], types: list[GgmlType]) -> None:
        """`types` are those of the gate, up and down projections of all experts."""
        super().__init__(spec, kernel)

        def method(columns: Shard, types: list[GgmlType], *parts: LinearPart) -> CpuLinearMethod:
            is_gated = len(parts) == 2
            return CpuLinearMethod(
                LinearSpec(parts[0].name, parts, columns, False, is_gated, spec.moe.dtype, spec.moe.device), types
            )

        experts, hidden = range(spec.moe.num_experts), Shard.whole(spec.moe.hidden_size)
        self._gate_up = [method(hidden, types[:2], *spec.gate_up_parts(expert)) for expert in experts]
        self._down = [method(spec.inner, types[2:], spec.down_part(expert)) for expert in experts]

    def targets(self) -> Targets:
        """Yield ``NAME.0.gate_proj.qweight`` and so on."""
        for method in (*self._gate_up, *self._down):
            yield from method.targets()

    def prepare(self) -> ExpertsOp:
        """Repack the blocks of one expert after the other."""
        gate_up, down = [each.prepare() for each in self._gate_up], [each.prepare() for each in self._down]

        def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return down[expert](gate_up[expert](rows))

        return lambda x, topk_weights, topk_ids: sum_over_experts(x, topk_weights, topk_ids, len(down), run)
