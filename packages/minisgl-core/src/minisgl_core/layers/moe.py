"""Routed experts (arXiv 2101.03961): a `MoeKernel` runs them."""

from __future__ import annotations

import torch
from torch import nn

from minisgl_core.contracts.layer import Layer, PackedModules, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.moe import ExpertWeights, MoeSpec, RoutingSpec
from minisgl_core.contracts.quantization import ExpertsOp, Quantization, QuantizationSpec
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import ModelFormatError, ProviderUnsupportedError
from minisgl_core.layers.base import Shard, empty_parameter


class FusedMoE(Layer):
    """Routing and gated experts. Every rank holds all experts, each split by its hidden dimension.

    Shape legend: T tokens, H hidden size, E experts, K experts per token, I width of an expert on this rank.
    """

    gate_up: nn.Parameter | None
    down: nn.Parameter | None
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        routing: RoutingSpec,
        build: BuildContext,
        *,
        correction_bias: torch.Tensor | None = None,
        activation: str = "silu",
        bias: bool = False,
        swiglu_limit: float | None = None,
        reduce: bool = True,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """Allocate this rank's part of every expert.

        Args:
            num_experts: E.
            hidden_size: H.
            intermediate_size: width of an expert of the whole model.
            routing: choice and weights of a token's experts.
            build: ranks, kernels and dtype.
            correction_bias: added to the scores for the choice alone, float32 [E]. The router's layer owns and loads it.
            activation: see `MoeSpec`.
            bias: the projections have biases.
            swiglu_limit: see `MoeSpec`.
            reduce: see `RowParallelLinear`.
            names: the checkpoint's names for an expert's projections.

        Raises:
            ModelFormatError: the routing does not fit the number of experts.
            ProviderUnsupportedError: the MoE kernel cannot serve these experts.
        """
        assert build.moe_kernel is not None, "a model with experts is built with a MoE kernel"
        check_routing(routing, num_experts)
        self._inner, self._names = Shard.of(intermediate_size, build), names
        inner, padded = self._inner.size, self._inner.is_padded
        plain = QuantizationSpec(build.dtype, build.device, num_experts)
        self._quantization = build.quantization or Quantization(plain, build.ops)
        spec = MoeSpec(
            num_experts=num_experts,
            top_k=routing.top_k,
            hidden_size=hidden_size,
            intermediate_size=inner,
            dtype=build.dtype,
            device=build.device,
            activation=activation,
            has_bias=bias,
            swiglu_limit=swiglu_limit,
            weight_dtype=self._quantization.expert_dtype,
        )
        if reasons := build.moe_kernel.unsupported(spec):
            raise ProviderUnsupportedError("moe", build.moe_kernel.__name__, reasons)
        self._kernel = build.moe_kernel(spec)
        self._apply: ExpertsOp = _not_prepared
        self._route, self._routing, self._correction_bias = build.ops.routing.route, routing, correction_bias
        self._communicator = build.communicator if reduce and build.tp_size > 1 else None
        self._owns_bias = build.tp_rank == 0
        self.gate_up = empty_parameter(num_experts, 2 * inner, hidden_size, build=build, zero=padded)
        self.down = empty_parameter(num_experts, hidden_size, inner, build=build, zero=padded)
        self.gate_up_bias = empty_parameter(num_experts, 2 * inner, build=build, zero=padded) if bias else None
        self.down_bias = empty_parameter(num_experts, hidden_size, build=build) if bias else None

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
        """Return the experts' output, and the shared experts' added to it before the one all-reduce.

        Args:
            x: [T, H].
            router_logits: [T, E].
            shared: the shared experts' output, not all-reduced, [T, H]; None without shared experts.

        Returns:
            [T, H].
        """
        topk_weights, topk_ids = self._route(router_logits, self._routing, self._correction_bias)
        out = self._apply(x, topk_weights, topk_ids)
        if shared is not None:
            out.add_(shared)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def prepare(self) -> None:
        """Hand the experts' weights to the kernels; one rank adds the bias of `down`, since the results are added up."""
        assert self.gate_up is not None
        assert self.down is not None
        if self.down_bias is not None and not self._owns_bias:
            self.down_bias.zero_()
        biases = (None if each is None else each.detach() for each in (self.gate_up_bias, self.down_bias))
        weights = ExpertWeights(self.gate_up.detach(), self.down.detach(), *biases)
        self.gate_up = self.down = self.gate_up_bias = self.down_bias = None
        self._apply = self._quantization.prepare_experts(self._kernel, weights)

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's part of each expert's projections: ``name.0.gate_proj.weight`` and so on."""
        assert self.gate_up is not None
        assert self.down is not None
        part, (gate_name, up_name, down_name) = self._inner, self._names
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield f"{name}.{expert}.{gate_name}.weight", part.target(gate_up[: part.size])
            yield f"{name}.{expert}.{up_name}.weight", part.target(gate_up[part.size :])
            yield f"{name}.{expert}.{down_name}.weight", part.target(down, dim=1)
        if self.gate_up_bias is None or self.down_bias is None:
            return
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_bias, self.down_bias, strict=True)):
            yield f"{name}.{expert}.{gate_name}.bias", part.target(gate_up[: part.size])
            yield f"{name}.{expert}.{up_name}.bias", part.target(gate_up[part.size :])
            yield f"{name}.{expert}.{down_name}.bias", WeightTarget(down, shape=tuple(down.shape))


def check_routing(routing: RoutingSpec, num_experts: int) -> None:
    """Refuse a routing that no experts, or other experts, could have.

    Raises:
        ModelFormatError: names the field.
    """
    groups, best, top_k = routing.num_groups, routing.topk_groups, routing.top_k
    assert type(routing) is RoutingSpec, f"no kernel knows the fields of {type(routing).__name__}"
    if routing.scoring not in ("softmax", "sigmoid"):
        raise ModelFormatError(f"routing: scoring={routing.scoring!r} is neither softmax nor sigmoid")
    if groups < 1 or num_experts % groups:
        raise ModelFormatError(f"routing: num_groups={groups} does not divide the {num_experts} experts")
    if not 1 <= best <= groups:
        raise ModelFormatError(f"routing: topk_groups={best} is not between 1 and num_groups={groups}")
    if not 1 <= top_k <= best * (num_experts // groups):
        allowed = best * (num_experts // groups)
        raise ModelFormatError(
            f"routing: top_k={top_k} is not between 1 and {allowed}, the experts of topk_groups={best}"
        )


def _not_prepared(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the weights have not been loaded (minisgl_core.engine.loader.load_weights)")
