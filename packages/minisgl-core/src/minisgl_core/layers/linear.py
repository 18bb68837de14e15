"""Linear layers split over ranks by their rows (column parallel) or columns (row parallel), after Megatron-LM
(arXiv 1909.08053). Weights are ``[out, in]``; a `LinearMethod` holds and multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from minisgl_core.contracts.layer import Layer, PackedModules, Targets
from minisgl_core.contracts.layer_methods import LinearMethod, LinearPart, LinearSpec
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.base import Shard, check_tp_size


class ReplicatedLinear(Layer):
    """``x @ weight.T + bias``, the same on every rank.

    Its weights are allocated when the checkpoint's name of the layer is known, by the first `weight_targets`.

    Attributes:
        may_be_quantized: whether ``--quantization`` holds for this layer.
    """

    may_be_quantized: ClassVar[bool] = False

    def __init__(self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False) -> None:
        """Describe a weight of ``[out_features, in_features]``."""
        self._describe([Shard.whole(out_features)], Shard.whole(in_features), build, bias=bias)

    def _describe(
        self, parts: list[Shard], columns: Shard, build: BuildContext, *, bias: bool, gated: bool = False
    ) -> None:
        provider = build.quantization if self.may_be_quantized else None
        self._quantization = provider or build.unquantized
        self._parts, self._columns, self._has_bias, self._is_gated = parts, columns, bias, gated
        self._method: LinearMethod | None = None
        self._apply: LinearOp = not_prepared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] to [T, out]."""
        return self._apply(x)

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's part of the tensors that the checkpoint has for the layer, and a subclass's parameters."""
        if self._method is None:
            spec = self._quantization.spec
            parts = tuple(self._named_parts(name, packed))
            self._method = self._quantization.linear(
                LinearSpec(name, parts, self._columns, self._has_bias, self._is_gated, spec.dtype, spec.device)
            )
        yield from self._method.targets()
        yield from super().weight_targets(name, packed)

    def _named_parts(self, name: str, packed: PackedModules) -> Sequence[LinearPart]:
        """Return the parts under their names, or as rows of the one module in which the checkpoint has them all."""
        parent, dot, attribute = name.rpartition(".")
        if names := [f"{parent}{dot}{part}" for part in packed.get(attribute, ())]:
            return [LinearPart(each, part) for each, part in zip(names, self._parts, strict=True)]
        total, start, found = sum(part.total for part in self._parts), 0, []
        for part in self._parts:
            found.append(LinearPart(name, part.shifted(start, total)))
            start += part.total
        return found

    def prepare(self) -> None:
        """Turn the loaded weights into the layer's operation."""
        assert self._method is not None, "the weights have not been loaded, or were given away before"
        method, self._method = self._method, None
        self._apply = method.prepare()


class MergedColumnParallelLinear(ReplicatedLinear):
    """Projections of the same input in one GEMM, each split over the ranks by rows: ``[part 0; part 1; ...]``."""

    may_be_quantized = True

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        build: BuildContext,
        *,
        bias: bool = False,
        silu_and_mul: bool = False,
    ) -> None:
        """Describe this rank's rows of each projection.

        Args:
            in_features: of all.
            out_features: of each projection of the whole model.
            build: ranks, kernels and dtype.
            bias: whether there are biases.
            silu_and_mul: return ``silu(gate) * up`` of two projections, computed in the GEMM's epilogue by kernels that can.
        """
        assert not silu_and_mul or len(out_features) == 2, "gate and up"
        parts = [Shard.of(n, build) for n in out_features]
        self._describe(parts, Shard.whole(in_features), build, bias=bias, gated=silu_and_mul)


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
        self._describe([q, kv, kv], Shard.whole(hidden_size), build, bias=bias)
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
        """Describe this rank's columns.

        Args:
            in_features: of the whole model.
            out_features: likewise.
            build: ranks, kernels and dtype.
            bias: whether there is a bias.
            reduce: whether `forward` all-reduces. Without it, an `RMSNorm` with ``all_reduce=True`` must follow.
        """
        # One rank adds the bias, since the results are added up.
        owns_bias = bias and build.tp_rank == 0
        self._describe([Shard.whole(out_features)], Shard.of(in_features, build), build, bias=owns_bias)
        self._leaves_bias = bias and not owns_bias
        self._communicator = build.communicator if reduce and build.tp_size > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in / tp] to [T, out]."""
        out = self._apply(x)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's columns, and the bias, of which all ranks but the first take nothing."""
        yield from super().weight_targets(name, packed)
        if self._leaves_bias:
            yield f"{name}.bias", WeightTarget(torch.empty(0), (slice(0, 0),), shape=(self._parts[0].total,))


def not_prepared(x: torch.Tensor) -> torch.Tensor:
    """Stand for a GEMM until `prepare` has made it."""
    raise AssertionError("the weights have not been loaded (minisgl_core.weights.loader.load_weights)")
