"""Linear layers split over ranks by their rows (column parallel) or columns (row parallel), after Megatron-LM
(arXiv 1909.08053). Weights are ``[out, in]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from minisgl_core.contracts.layer import Layer, PackedModules, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.base import Shard, check_tp_size, empty_parameter


class ReplicatedLinear(Layer):
    """``x @ weight.T + bias``, the same on every rank.

    After `prepare` the weight belongs to the GEMM that the ops or the quantization made of it, which may have packed it.

    Attributes:
        may_be_quantized: whether ``--quantization`` holds for this layer.
    """

    may_be_quantized: ClassVar[bool] = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False, zero: bool = False
    ) -> None:
        """Allocate ``[out_features, in_features]``; `zero` where part of it is padding."""
        self._linear_method = build.linear_method if self.may_be_quantized else build.ops.linear
        self._apply: LinearOp = not_prepared
        self.weight = empty_parameter(out_features, in_features, build=build, zero=zero)
        self.bias = empty_parameter(out_features, build=build, zero=zero) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] to [T, out]."""
        return self._apply(x)

    def prepare(self) -> None:
        """Hand the weight to the kernels."""
        self._apply = self._linear_method.prepare_linear(*self._release())

    def _release(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give weight and bias away, so that the kernels' packed copy is the only one."""
        assert self.weight is not None, "the weights were given away before"
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self.weight = self.bias = None
        return weight, bias


class MergedColumnParallelLinear(ReplicatedLinear):
    """Projections of the same input in one GEMM, each split over the ranks by rows: ``[part 0; part 1; ...]``."""

    may_be_quantized = True
    _silu_and_mul = False

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        build: BuildContext,
        *,
        bias: bool = False,
        silu_and_mul: bool = False,
    ) -> None:
        """Allocate this rank's rows of each projection.

        Args:
            in_features: of all.
            out_features: of each projection of the whole model.
            build: ranks, kernels and dtype.
            bias: whether there are biases.
            silu_and_mul: return ``silu(gate) * up`` of two projections, computed in the GEMM's epilogue by kernels that can.
        """
        assert not silu_and_mul or len(out_features) == 2, "gate and up"
        self._silu_and_mul = silu_and_mul
        self._set_parts([Shard.of(n, build) for n in out_features], in_features, build, bias)

    def _set_parts(self, parts: list[Shard], in_features: int, build: BuildContext, bias: bool) -> None:
        padded = any(part.is_padded for part in parts)
        super().__init__(in_features, sum(part.size for part in parts), build, bias=bias, zero=padded)
        self._parts = parts

    def prepare(self) -> None:
        """Hand the weight to the kernels, with the activation."""
        if self._silu_and_mul:
            self._apply = self._linear_method.prepare_gated(*self._release())
        else:
            super().prepare()

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's rows of each projection, or of the one tensor in which the checkpoint has them all."""
        parent, dot, attribute = name.rpartition(".")
        names = [f"{parent}{dot}{part}" for part in packed.get(attribute, ())]
        is_fused = len(self._parts) > 1 and not names
        total, row, start = sum(part.total for part in self._parts), 0, 0
        for source, part in zip(names or [name] * len(self._parts), self._parts, strict=True):
            for kind, held in (("weight", self.weight), ("bias", self.bias)):
                if held is not None:
                    rows = held[row : row + part.size]
                    target = part.target(rows, whole=(start, total)) if is_fused else part.target(rows)
                    yield f"{source}.{kind}", target
            row, start = row + part.size, start + part.total


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections in one GEMM, split over the ranks by heads.

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
        """Head counts are the whole model's.

        Raises:
            InvalidValueError: the heads cannot be split over ``build.tp_size`` ranks.
        """
        check_tp_size(num_q_heads, num_kv_heads, build.tp_size)
        first_kv = build.tp_rank * num_kv_heads // build.tp_size
        self.num_q_heads, self.num_kv_heads = num_q_heads // build.tp_size, max(num_kv_heads // build.tp_size, 1)
        kv_start, kv_size = first_kv * head_dim, self.num_kv_heads * head_dim
        kv = Shard(kv_start, kv_start + kv_size, kv_size, num_kv_heads * head_dim)
        q = Shard.of(num_q_heads * head_dim, build)
        self._set_parts([q, kv, kv], hidden_size, build, bias)
        self._heads = [self.num_q_heads, self.num_kv_heads, self.num_kv_heads]
        self._view = (-1, sum(self._heads), head_dim)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] to q [T, Hq, D], k and v [T, Hkv, D]."""
        # Tensor.split goes through Python and takes twice as long.
        q, k, v = torch.split_with_sizes(self._apply(x).view(self._view), self._heads, 1)
        return q, k, v


class RowParallelLinear(ReplicatedLinear):
    """A linear layer split by columns: each rank multiplies its part of the input, and an all-reduce adds the results up."""

    may_be_quantized = True

    def __init__(
        self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False, reduce: bool = True
    ) -> None:
        """Allocate this rank's columns.

        Args:
            in_features: of the whole model.
            out_features: likewise.
            build: ranks, kernels and dtype.
            bias: whether there is a bias.
            reduce: whether `forward` all-reduces. Without it, an `RMSNorm` with ``all_reduce=True`` must follow.
        """
        self._columns = Shard.of(in_features, build)
        super().__init__(self._columns.size, out_features, build, bias=bias, zero=self._columns.is_padded)
        self._communicator = build.communicator if reduce and build.tp_size > 1 else None
        self._owns_bias = build.tp_rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in / tp] to [T, out]."""
        out = self._apply(x)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's columns, and the whole bias."""
        assert self.weight is not None
        yield f"{name}.weight", self._columns.target(self.weight, dim=1)
        if self.bias is not None:
            yield f"{name}.bias", WeightTarget(self.bias)

    def prepare(self) -> None:
        """Hand the weight to the kernels; one rank adds the bias, since the results are added up."""
        if not self._owns_bias:
            self.bias = None
        super().prepare()


def not_prepared(x: torch.Tensor) -> torch.Tensor:
    """Stand for a GEMM until `prepare` has made it."""
    raise AssertionError("the weights have not been loaded (minisgl_core.engine.loader.load_weights)")
