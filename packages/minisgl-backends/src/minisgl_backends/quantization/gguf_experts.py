"""Packed experts of GGUF files, which CPUs and GPUs repack for kernels of their own."""

from collections.abc import Callable
from typing import ClassVar

import torch

from minisgl_backends.moe.torch_kernel import TorchMoe, sum_over_experts
from minisgl_backends.quantization.gguf_method import GgufLinearMethod
from minisgl_backends.quantization.gguf_types import GgmlType
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsOp, ExpertsSpec, LinearPart, LinearSpec
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.shard import Shard


class GgufExperts(ExpertsMethod):
    """The file's blocks of a layer's experts. Subclasses repack them in `prepare`.

    Attributes:
        replaced_kernel: MoE kernel that the packed kernels replace. If another one is selected, the experts are
            dequantized for it.
        gate_up: gate and up projection of each expert.
        down: down projection of each expert.
    """

    replaced_kernel: ClassVar[type[MoeKernel]]

    @classmethod
    def supports(cls, spec: ExpertsSpec, kernel: type[MoeKernel]) -> bool:
        """Return True if `kernel` is replaced, and experts have separate gate and up projections, no biases, and SiLU."""
        moe = spec.moe
        has_activation = moe.activation == "silu" and moe.swiglu_limit is None
        return kernel is cls.replaced_kernel and has_activation and not moe.has_bias and not spec.is_stacked

    def __init__(
        self,
        spec: ExpertsSpec,
        kernel: type[MoeKernel],
        types: list[GgmlType],
        linear: Callable[[LinearSpec, list[GgmlType]], GgufLinearMethod],
    ) -> None:
        """Allocate the blocks.

        `types` are those of the gate, up and down projections of all experts. `linear` is the class of linear layers, which
        loads the blocks of an expert.
        """
        super().__init__(spec, kernel)

        def method(columns: Shard, types: list[GgmlType], *parts: LinearPart) -> GgufLinearMethod:
            is_gated = len(parts) == 2
            layer = LinearSpec(parts[0].name, parts, columns, False, is_gated, spec.moe.dtype, spec.moe.device)
            return linear(layer, types)

        experts, hidden = range(spec.moe.num_experts), Shard.whole(spec.moe.hidden_size)
        self.gate_up = [method(hidden, types[:2], *spec.gate_up_parts(expert)) for expert in experts]
        self.down = [method(spec.inner, types[2:], spec.down_part(expert)) for expert in experts]

    def targets(self) -> Targets:
        """Yield ``NAME.0.gate_proj.qweight`` and so on."""
        for method in (*self.gate_up, *self.down):
            yield from method.targets()


class CpuExperts(GgufExperts):
    """Experts for the C kernels. Each is two layers: gate and up with the activation, and down."""

    replaced_kernel = TorchMoe

    def prepare(self) -> ExpertsOp:
        """Repack the blocks of one expert after the other."""
        gate_up, down = [each.prepare() for each in self.gate_up], [each.prepare() for each in self.down]

        def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return down[expert](gate_up[expert](rows))

        return lambda x, topk_weights, topk_ids: sum_over_experts(x, topk_weights, topk_ids, len(down), run)
