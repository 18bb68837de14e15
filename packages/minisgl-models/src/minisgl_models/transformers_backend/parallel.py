"""Tensor-parallel plan of a transformers model, and its linear layers, which are sharded over the ranks by this plan.

A plan names modules or parameters and styles (``"layers.*.mlp.up_proj": "colwise"``). The rest is whole on every rank.
"""

import math
import re
from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import VocabShard
from minisgl_core.contracts.shard import allowed_tp_sizes
from minisgl_core.errors import InvalidValueError
from minisgl_core.layers import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from minisgl_models.transformers_backend.trace import Traced

# fmt: off
_REPLICATED = (
    "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "embedding_rowwise", "embedding_colwise",
)
# fmt: on
"""Styles of modules that are whole on every rank here. Embeddings cost memory this way, and save an all-reduce."""
EXPERTS = "moe_tp_experts"
"""Style of a module with stacked experts; see `minisgl_models.transformers_backend.expert_shards`."""
_MLA_PLAN = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
"""Plan of multi-head latent attention for models whose own plan leaves attention out, such as DeepSeek-V3."""


class _ColumnParallel(MergedColumnParallelLinear):
    may_be_quantized = False


class _RowParallel(RowParallelLinear):
    may_be_quantized = False


class _SplitInput(_RowParallel):
    """A row-parallel layer whose input is whole on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, in] to [T, out]."""
        columns = self._columns
        return super().forward(pad(x[:, columns.start : columns.stop], (0, columns.size - columns.unpadded_size)))


class _Gathered(_ColumnParallel):
    """A column-parallel layer whose outputs are gathered, such as an LM head."""

    def __init__(self, in_features: int, out_features: int, build: BuildContext, *, bias: bool) -> None:
        super().__init__(in_features, [out_features], build, bias=bias)
        self._shard = VocabShard(build.communicator, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, in] to [T, out]."""
        return self._shard.gather(super().forward(x))


class LinearModule(nn.Module):
    """A linear layer of minisgl in the place of a `torch.nn.Linear`.

    Attributes:
        layer: the layer, which holds and multiplies the weight.
        weight: the dtype of the weight, which some models read. It is no tensor, so that a model that computes with it fails.
    """

    def __init__(self, layer: ReplicatedLinear, weight: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.weight = layer, SimpleNamespace(dtype=weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in] to [..., out]."""
        out = self.layer.forward(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


def tp_plan(model: Any, traced: Traced, build: BuildContext) -> dict[str, str]:
    """Return the styles by the name of their module or parameter, with ``*`` for numbers. One rank has no plan.

    Raises:
        InvalidValueError: the model has no plan, or ``--tp`` does not divide its heads.
    """
    if build.tp_size == 1:
        return {}
    plan = dict(model.tp_plan or {})
    check_plan(type(model).__name__, plan, traced, build.tp_size)
    for call in traced.calls:
        path = f"{generic_name(call.module)}."
        if hasattr(model.get_submodule(call.module), "kv_b_proj") and not any(each.startswith(path) for each in plan):
            plan |= {f"{path}{name}": style for name, style in _MLA_PLAN.items()}
        if call.sinks:
            plan.pop(generic_name(call.sinks), None)  # `minisgl_core.layers.Attention` shards them
    return plan


def replace_linears(
    model: Any, kept: Set[str], plan: Mapping[str, str], build: BuildContext
) -> dict[str, ReplicatedLinear]:
    """Put `LinearModule`s in the place of the linear layers of a model on the meta device, by the plan of `tp_plan`.

    Layers whose names are in `kept` stay, because another module has the same weight.

    Returns:
        The layers by the name of their modules.

    Raises:
        InvalidValueError: the plan has a style that is not supported (``--tp``).
    """
    linears = [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear and name not in kept]
    layers = {}
    for name, linear in linears:
        if linear.weight.dtype == build.dtype:  # not those that the architecture keeps in float32
            layers[name] = _layer(name, linear, plan, build)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LinearModule(layers[name], linear.weight))
    return layers


def check_applied(model: nn.Module, plan: Mapping[str, str], applied: Set[str], tp_size: int) -> None:
    """Refuse a plan that shards other modules or parameters than those in `applied`.

    Raises:
        InvalidValueError: names ``--tp``.
    """
    # A plan may name optional parts that this model lacks, such as experts.
    names = {generic_name(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    others = names - {generic_name(name) for name in applied}
    for name, style in plan.items():
        if name in others and style not in (*_REPLICATED, EXPERTS):
            raise InvalidValueError(
                "--tp",
                tp_size,
                f"1: the tensor-parallel plan of {type(model).__name__} has {style!r} for {name}, which is neither a linear"
                " layer nor a weight of stacked experts",
            )


def check_plan(name: str, plan: Mapping[str, str], traced: Traced, tp_size: int) -> None:
    """Refuse a model class without a plan, and a size that does not divide its heads. KV heads are not replicated.

    Raises:
        InvalidValueError: names ``--tp``.
    """
    q_heads, kv_heads = ({getattr(call, key) for call in traced.calls} for key in ("num_q_heads", "num_kv_heads"))
    if not any(style.startswith("rowwise") for style in plan.values()):
        raise InvalidValueError(
            "--tp", tp_size, f"1: {name} has no tensor-parallel plan in transformers (base_model_tp_plan)"
        )
    num_heads = math.gcd(*q_heads, *kv_heads)  # a size divides the heads of all layers
    if num_heads % tp_size:
        allowed = allowed_tp_sizes(num_heads, num_heads)
        heads = f"{_joined(q_heads)} query heads, {_joined(kv_heads)} KV heads"
        raise InvalidValueError("--tp", tp_size, f"one of {', '.join(map(str, allowed))} for {name} ({heads})")


def _joined(nums: Set[int]) -> str:
    return " and ".join(map(str, sorted(nums)))


def generic_name(name: str) -> str:
    """Return the name of a module or parameter with ``*`` for numbers, as plans have it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _layer(name: str, linear: nn.Linear, plan: Mapping[str, str], build: BuildContext) -> ReplicatedLinear:
    style = plan.get(generic_name(name), "replicate")
    sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
    if style in _REPLICATED:
        return ReplicatedLinear(*sizes, build, bias=bias)
    if style in ("colwise_gather_output", "colwise_rep"):
        return _Gathered(*sizes, build, bias=bias)
    if style == "colwise":
        return _ColumnParallel(sizes[0], [sizes[1]], build, bias=bias)
    if style == "rowwise":
        return _RowParallel(*sizes, build, bias=bias)
    if style in ("rowwise_split_input", "rowwise_rep"):
        return _SplitInput(*sizes, build, bias=bias)
    raise InvalidValueError("--tp", build.tp_size, f"1: {name} has the style {style!r}, which minisgl does not know")
