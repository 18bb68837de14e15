"""Routed experts (arXiv 2101.03961): a `MoeKernel` runs them."""

from __future__ import annotations

import torch
from torch import nn

from minisgl_core.contracts.layer import Layer, PackedModules, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.quantization import ExpertsOp, Quantization, QuantizationSpec
from minisgl_core.errors import ProviderUnsupportedError
from minisgl_core.layers.base import Shard, empty_parameter


class FusedMoE(Layer):
    """Softmax routing and gated SiLU experts. Every rank holds all experts, each split by its hidden dimension.

    Shape legend: T tokens, H hidden size, E experts, K experts per token, I width of an expert on this rank.
    """

    gate_up: nn.Parameter | None
    down: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        *,
        renormalize: bool,
        reduce: bool = True,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """Allocate this rank's part of every expert.

        Args:
            num_experts: E.
            top_k: K.
            hidden_size: H.
            intermediate_size: width of an expert of the whole model.
            build: ranks, kernels and dtype.
            renormalize: let the weights of a token's experts sum to 1.
            reduce: see `RowParallelLinear`.
            names: the checkpoint's names for an expert's projections.

        Raises:
            ProviderUnsupportedError: the MoE kernel cannot serve these shapes.
        """
        assert build.moe_kernel is not None, "a model with experts is built with a MoE kernel"
        self._inner, self._names = Shard.of(intermediate_size, build), names
        inner, padded = self._inner.size, self._inner.is_padded
        spec = MoeSpec(num_experts, top_k, hidden_size, inner, build.dtype, build.device)
        if reasons := build.moe_kernel.unsupported(spec):
            raise ProviderUnsupportedError("moe", build.moe_kernel.__name__, reasons)
        self._kernel = build.moe_kernel(spec)
        plain = QuantizationSpec(build.dtype, build.device, num_experts)
        self._quantization = build.quantization or Quantization(plain, build.ops)
        self._apply: ExpertsOp = _not_prepared
        self._route, self._top_k, self._renormalize = build.ops.routing.route, top_k, renormalize
        self._communicator = build.communicator if reduce and build.tp_size > 1 else None
        self.gate_up = empty_parameter(num_experts, 2 * inner, hidden_size, build=build, zero=padded)
        self.down = empty_parameter(num_experts, hidden_size, inner, build=build, zero=padded)

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """x [T, H] and router_logits [T, E] to [T, H]."""
        weights, ids = self._route(router_logits, self._top_k, self._renormalize)
        out = self._apply(x, weights, ids)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def prepare(self) -> None:
        """Hand the experts' weights to the kernels."""
        assert self.gate_up is not None
        assert self.down is not None
        gate_up, down = self.gate_up.detach(), self.down.detach()
        self.gate_up = self.down = None
        self._apply = self._quantization.prepare_experts(self._kernel, gate_up, down)

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's part of each expert's projections: ``name.0.gate_proj.weight`` and so on."""
        assert self.gate_up is not None
        assert self.down is not None
        part, (gate_name, up_name, down_name) = self._inner, self._names
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield f"{name}.{expert}.{gate_name}.weight", part.target(gate_up[: part.size])
            yield f"{name}.{expert}.{up_name}.weight", part.target(gate_up[part.size :])
            yield f"{name}.{expert}.{down_name}.weight", part.target(down, dim=1)


def _not_prepared(x: torch.Tensor, expert_weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the weights have not been loaded (minisgl_core.engine.loader.load_weights)")
