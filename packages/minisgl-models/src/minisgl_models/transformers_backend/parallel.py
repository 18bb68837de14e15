"""Linear layers of a transformers model, sharded over the ranks by its own tensor-parallel plan.

A plan names modules and styles (``"layers.*.mlp.up_proj": "colwise"``). Everything else is the same on every rank.
"""

import math
import re
from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import VocabShard
from minisgl_core.errors import InvalidValueError
from minisgl_core.layers import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from minisgl_core.layers.base import allowed_tp_sizes
from minisgl_models.transformers_backend.trace import Traced

_REPLICATED = ("replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise")
"""Styles of modules that are whole on every rank here. Embeddings cost memory this way, and save an all-reduce."""
_GATHERED = ("colwise_gather_output", "colwise_rep")


class _ColumnParallel(MergedColumnParallelLinear):
    may_be_quantized = False


class _RowParallel(RowParallelLinear):
    may_be_quantized = False


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


def replace_linears(model: Any, kept: Set[str], build: BuildContext) -> dict[str, ReplicatedLinear]:
    """Put `LinearModule`s in the place of the model's linear layers.

    Args:
        model: transformers' model, on the meta device.
        kept: names of the layers that stay, because another module has the same weight.
        build: ranks, kernels and dtype.

    Returns:
        The layers by the name of their modules.

    Raises:
        InvalidValueError: the plan has a style that is not supported (``--tp``).
    """
    plan = _plan(model) if build.tp_size > 1 else {}
    linears = [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear and name not in kept]
    layers = {}
    for name, linear in linears:
        if linear.weight.dtype == build.dtype:  # not those that the architecture keeps in float32
            layers[name] = _layer(name, linear, plan, build)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LinearModule(layers[name], linear.weight))
    applied = {_generic(name) for name in (*layers, *kept)}
    # A plan may name optional parts that this model lacks, such as experts.
    others = {_generic(name) for name, _ in (*model.named_modules(), *model.named_parameters())} - applied
    unused = {key: style for key, style in plan.items() if style not in _REPLICATED and key in others}
    if unused:
        key, style = next(iter(unused.items()))
        raise InvalidValueError(
            "--tp",
            build.tp_size,
            f"1: the tensor-parallel plan of {type(model).__name__} has {style!r} for {key}, which is not a linear layer",
        )
    return layers


def check_tp_size(model: Any, traced: Traced, build: BuildContext) -> None:
    """Refuse a tensor-parallel size if the model has no plan, or if the size does not divide its heads.

    Raises:
        InvalidValueError: names ``--tp``.
    """
    if build.tp_size == 1:
        return
    name = type(model).__name__
    q_heads, kv_heads = ({getattr(call, key) for call in traced.calls} for key in ("num_q_heads", "num_kv_heads"))
    num_q_heads, num_kv_heads = math.gcd(*q_heads), math.gcd(*kv_heads)  # a size divides the heads of all layers
    if not any(style == "rowwise" for style in _plan(model).values()):
        raise InvalidValueError(
            "--tp", build.tp_size, f"1: {name} has no tensor-parallel plan in transformers (base_model_tp_plan)"
        )
    allowed = [size for size in allowed_tp_sizes(num_q_heads, num_kv_heads) if num_kv_heads % size == 0]
    if build.tp_size not in allowed:
        heads = f"{_joined(q_heads)} query heads, {_joined(kv_heads)} KV heads"
        raise InvalidValueError("--tp", build.tp_size, f"one of {', '.join(map(str, allowed))} for {name} ({heads})")


def _joined(nums: Set[int]) -> str:
    return " and ".join(map(str, sorted(nums)))


def _plan(model: Any) -> Mapping[str, str]:
    """Return the styles by the module's name with ``*`` for numbers."""
    plan: Mapping[str, str] = model.tp_plan or {}
    return plan


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _layer(name: str, linear: nn.Linear, plan: Mapping[str, str], build: BuildContext) -> ReplicatedLinear:
    style = plan.get(_generic(name), "replicate")
    sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
    if style in _REPLICATED:
        return ReplicatedLinear(*sizes, build, bias=bias)
    if style in _GATHERED:
        return _Gathered(*sizes, build, bias=bias)
    if style == "colwise":
        return _ColumnParallel(sizes[0], [sizes[1]], build, bias=bias)
    if style == "rowwise":
        return _RowParallel(*sizes, build, bias=bias)
    raise InvalidValueError("--tp", build.tp_size, f"1: {name} has the style {style!r}, which minisgl does not know")
