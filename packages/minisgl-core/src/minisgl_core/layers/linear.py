"""Matrices split over ranks by their rows (column parallel) or their columns (row parallel), after Megatron-LM
(arXiv 1909.08053). Weights are ``[out, in]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.base import Layer, Shard, SumOverRanks, empty_parameter

Targets = Iterator[tuple[str, WeightTarget]]
"""Checkpoint names and where their values go."""


class Linear(Layer):
    """``x @ weight.T + bias`` on one rank; used as it is, it is replicated.

    After `prepare` the matrix belongs to the operation that `prepare_linear` made, which may have packed or quantised it.

    Attributes:
        may_be_quantized: whether ``--quantization`` holds for this layer.
    """

    may_be_quantized: ClassVar[bool] = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    op: LinearOp

    def __init__(
        self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False, zero: bool = False
    ) -> None:
        """Allocate ``[out_features, in_features]``; `zero` where part of it is padding."""
        super().__init__()
        self._products = build.products if self.may_be_quantized else build.ops
        self.op = not_prepared
        self.weight = empty_parameter(out_features, in_features, build=build, zero=zero)
        self.bias = empty_parameter(out_features, build=build, zero=zero) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] to [T, out]."""
        return self.op(x)

    def weight_targets(self, name: str) -> Targets:
        """All of ``name.weight`` and ``name.bias``."""
        assert self.weight is not None, "the weights were given away by prepare()"
        yield f"{name}.weight", WeightTarget(self.weight)
        if self.bias is not None:
            yield f"{name}.bias", WeightTarget(self.bias)

    def prepare(self) -> None:
        """Hand the matrix to the kernels."""
        if self.weight is not None:
            self.op = self._products.prepare_linear(*self.release())

    def release(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give the matrix and the bias away, for good."""
        assert self.weight is not None, "the weights were given away before"
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self.weight = self.bias = None
        return weight, bias


class ColumnParallelLinear(Linear):
    """Matrices that read the same input, each split by rows, stacked: ``[part 0; part 1; ...]`` of this rank."""

    may_be_quantized = True

    def __init__(
        self, in_features: int, out_features: Sequence[int], build: BuildContext, *, bias: bool = False
    ) -> None:
        """One matrix for each entry of `out_features`."""
        self._set_parts([Shard.of(n, build) for n in out_features], in_features, build, bias)

    def _set_parts(self, parts: list[Shard], in_features: int, build: BuildContext, bias: bool) -> None:
        padded = any(part.is_padded for part in parts)
        super().__init__(in_features, sum(part.size for part in parts), build, bias=bias, zero=padded)
        self._parts = parts

    def weight_targets(self, *names: str) -> Targets:
        """This rank's rows of each named matrix."""
        assert self.weight is not None, "the weights were given away by prepare()"
        row = 0
        for name, part in zip(names, self._parts, strict=True):
            rows = slice(row, row + part.size)
            yield f"{name}.weight", part.target(self.weight[rows])
            if self.bias is not None:
                yield f"{name}.bias", part.target(self.bias[rows])
            row += part.size


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections in one matrix, split by heads.

    With more ranks than KV heads, ranks share: rank r holds KV head ``r * Hkv // tp``.

    Attributes:
        num_q_heads: Hq of this rank.
        num_kv_heads: Hkv of this rank.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_q_heads: int,
        num_kv_heads: int,
        build: BuildContext,
        *,
        bias: bool = False,
    ) -> None:
        """Head counts are the whole model's; `check_tp_size` must have passed."""
        first_kv = build.tp_rank * num_kv_heads // build.tp_size
        local_q, local_kv = num_q_heads // build.tp_size, max(num_kv_heads // build.tp_size, 1)
        kv_start, kv_size = first_kv * head_dim, local_kv * head_dim
        kv = Shard(kv_start, kv_start + kv_size, kv_size, num_kv_heads * head_dim)
        q = Shard.of(num_q_heads * head_dim, build)
        self._set_parts([q, kv, kv], hidden_size, build, bias)
        self.num_q_heads, self.num_kv_heads = local_q, local_kv


class RowParallelLinear(Linear):
    """A matrix split by columns: each rank multiplies its part of the input, and the products are summed."""

    may_be_quantized = True

    def __init__(self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False) -> None:
        """`in_features` of the whole model."""
        self._columns = Shard.of(in_features, build)
        super().__init__(self._columns.size, out_features, build, bias=bias, zero=self._columns.is_padded)
        self._sum, self._owns_bias = SumOverRanks.of(build), build.tp_rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in / tp] to [T, out], the same on every rank."""
        return self.op(x) if self._sum is None else self._sum(self.op(x))

    def last_sum(self) -> SumOverRanks | None:
        """Of the products of each rank's own columns. See `Layer`."""
        return self._sum

    def weight_targets(self, name: str) -> Targets:
        """This rank's columns; the whole bias."""
        assert self.weight is not None, "the weights were given away by prepare()"
        yield f"{name}.weight", self._columns.target(self.weight, dim=1)
        if self.bias is not None:
            yield f"{name}.bias", WeightTarget(self.bias)

    def prepare(self) -> None:
        """Hand the matrix to the kernels; one rank adds the bias, since the results are summed."""
        if not self._owns_bias:
            self.bias = None
        super().prepare()


def fused_targets(targets: Targets, fused: str, parts: Sequence[str]) -> Targets:
    """Targets for a checkpoint that holds matrices with the same input stacked, as one.

    Args:
        targets: of the matrices one by one; those of others are passed on.
        fused: the checkpoint's name for the whole, such as ``qkv_proj``.
        parts: what `targets` calls the parts, such as ``q_proj``, ``k_proj`` and ``v_proj``, in the order of their rows.
    """
    wholes: dict[str, dict[str, WeightTarget]] = {}
    for name, target in targets:
        module, _, kind = name.rpartition(".")
        parent, dot, part = module.rpartition(".")
        if part in parts and kind in ("weight", "bias"):
            wholes.setdefault(f"{parent}{dot}{fused}.{kind}", {})[part] = target
        else:
            yield name, target
    for name, held in wholes.items():
        shapes = [held[part].shape or tuple(held[part].destination.shape) for part in parts]
        whole, row = (sum(shape[0] for shape in shapes), *shapes[0][1:]), 0
        for part, shape in zip(parts, shapes, strict=True):
            rows, *others = held[part].index or (slice(None),)
            start, stop, _ = rows.indices(shape[0])
            yield name, replace(held[part], index=(slice(row + start, row + stop), *others), shape=whole)
            row += shape[0]


def not_prepared(x: torch.Tensor) -> torch.Tensor:
    """Stands for an operation until `prepare` has made it."""
    raise AssertionError("Model.finalize() has not been called")
