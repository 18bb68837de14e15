"""Routed experts (arXiv 2101.03961), which a `MoeKernel` computes."""

import torch

from minisgl_core.contracts.layer import FusedProjections, Layer, Targets
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsOp, ExpertsSpec
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.moe import MoeSpec, RoutingSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.errors import ModelFormatError, ProviderUnsupportedError
from minisgl_core.layers.base import not_prepared


class FusedMoE(Layer):
    """Routing and gated experts. Every rank has all experts, each sharded along its intermediate dimension.

    Shape legend: T tokens, H hidden size, E experts, K experts per token, I intermediate size of an expert on this rank.
    """

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
        is_stacked: bool = False,
    ) -> None:
        """Set the shapes of this rank's shard of the experts, which `weight_targets` allocates.

        Args:
            num_experts: E.
            hidden_size: H.
            intermediate_size: intermediate size of an expert in the whole model.
            routing: selection and weights of a token's experts.
            build: ranks, kernels and dtype.
            correction_bias: bias added to the scores for the selection only, float32 [E]. The router's layer loads it.
            activation: see `MoeSpec`.
            bias: True if the projections have biases.
            swiglu_limit: see `MoeSpec`.
            reduce: see `RowParallelLinear`.
            names: the checkpoint's names for an expert's projections.
            is_stacked: see `ExpertsSpec`; `names` are not used then.

        Raises:
            ModelFormatError: the routing does not fit the number of experts.
            ProviderUnsupportedError: the MoE kernel cannot serve these experts.
        """
        assert build.moe_kernel is not None, "a model with experts is built with a MoE kernel"
        check_routing(routing, num_experts)
        self._inner, self._names = Shard.of(intermediate_size, build.tp_rank, build.tp_size), names
        self._spec = MoeSpec(
            num_experts=num_experts,
            top_k=routing.top_k,
            hidden_size=hidden_size,
            intermediate_size=self._inner.size,
            dtype=build.dtype,
            device=build.device,
            activation=activation,
            has_bias=bias,
            swiglu_limit=swiglu_limit,
        )
        if reasons := build.moe_kernel.unsupported(self._spec):
            raise ProviderUnsupportedError("moe", build.moe_kernel.__name__, reasons)
        self._kernel, self._quantization = build.moe_kernel, build.quantization or build.unquantized
        self._method: ExpertsMethod | None = None
        self._apply: ExpertsOp = not_prepared
        self._route, self._routing, self._correction_bias = build.ops.routing.route, routing, correction_bias
        self._communicator = build.communicator if reduce and build.tp_size > 1 else None
        self._owns_bias, self._is_stacked = build.tp_rank == 0, is_stacked

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of the routed and the shared experts' outputs, after one all-reduce.

        Args:
            x: activations, [T, H].
            router_logits: logits of the router, [T, E].
            shared: output of the shared experts before an all-reduce, [T, H]; None if there are none.

        Returns:
            Output, [T, H]; without the all-reduce if `reduce` is False.
        """
        topk_weights, topk_ids = self._route(router_logits, self._routing, self._correction_bias)
        out = self._apply(x, topk_weights, topk_ids)
        if shared is not None:
            out.add_(shared)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def prepare(self) -> None:
        assert self._method is not None, "the weights have not been loaded, or `prepare` was called before"
        method, self._method = self._method, None
        self._apply = method.prepare()

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        if self._method is None:
            spec = ExpertsSpec(name, self._spec, self._inner, self._names, self._owns_bias, self._is_stacked)
            self._method = self._quantization.experts(spec, self._kernel)
        yield from self._method.targets()


def check_routing(routing: RoutingSpec, num_experts: int) -> None:
    """Check that the routing is valid and fits the number of experts.

    Raises:
        ModelFormatError: it does not. The message names the field.
    """
    num_groups, topk_groups, top_k = routing.num_groups, routing.topk_groups, routing.top_k
    assert type(routing) is RoutingSpec, f"no kernel knows the fields of {type(routing).__name__}"
    if routing.scoring not in ("softmax", "sigmoid"):
        raise ModelFormatError(f"routing: scoring={routing.scoring!r} is neither softmax nor sigmoid")
    if num_groups < 1 or num_experts % num_groups:
        raise ModelFormatError(f"routing: num_groups={num_groups} does not divide the {num_experts} experts")
    if not 1 <= topk_groups <= num_groups:
        raise ModelFormatError(f"routing: topk_groups={topk_groups} is not between 1 and num_groups={num_groups}")
    num_selectable = topk_groups * (num_experts // num_groups)
    if not 1 <= top_k <= num_selectable:
        raise ModelFormatError(
            f"routing: top_k={top_k} is not between 1 and {num_selectable}, the experts of topk_groups={topk_groups}"
        )
