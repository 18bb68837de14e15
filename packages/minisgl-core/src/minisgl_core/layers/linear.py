"""Linear layers whose output features (column parallel) or input features (row parallel) are sharded over ranks.

The scheme is Megatron-LM's (arXiv 1909.08053). Weights are [out, in]. A `LinearMethod` loads them and prepares the GEMM.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from minisgl_core.contracts.layer import FusedProjections, Layer, Targets
from minisgl_core.contracts.layer_methods import LinearMethod, LinearPart, LinearSpec, PlainLinear
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.shard import Shard, check_tp_size
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.base import not_prepared


class ReplicatedLinear(Layer):
    """Linear layer ``x @ weight.T + bias``, replicated on every rank, and base class of the sharded ones.

    The first call of `weight_targets` allocates the weights, because their format may depend on the layer's name.

    Attributes:
        may_be_quantized: True if ``--quantization`` applies to the layer.
    """

    may_be_quantized: ClassVar[bool] = False

    def __init__(self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False) -> None:
        """Set the shape of the weight, [out_features, in_features]."""
        self._set_shape([Shard.whole(out_features)], Shard.whole(in_features), build, bias=bias)

    def _set_shape(
        self, parts: list[Shard], columns: Shard, build: BuildContext, *, bias: bool, gated: bool = False
    ) -> None:
        """Set the shape of this rank's weight: shards of the rows, one per projection, and of the columns."""
        provider = build.quantization if self.may_be_quantized else None
        self._quantization = provider or build.unquantized
        self._parts, self._columns, self._has_bias, self._is_gated = parts, columns, bias, gated
        self._method: LinearMethod | None = None
        self._apply: LinearOp = not_prepared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, [T, out], for x, [T, in]."""
        return self._apply(x)

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield the targets for this rank's shards of the checkpoint's tensors, and the parameters of a subclass."""
        if self._method is None:
            spec = self._quantization.spec
            parts = tuple(self._named_parts(name, fused_projections))
            layer = LinearSpec(name, parts, self._columns, self._has_bias, self._is_gated, spec.dtype, spec.device)
            self._method = self._make_method(layer)
        yield from self._method.targets()
        yield from super().weight_targets(name, fused_projections)

    def _make_method(self, spec: LinearSpec) -> LinearMethod:
        return self._quantization.linear(spec)

    def _named_parts(self, name: str, fused_projections: FusedProjections) -> Sequence[LinearPart]:
        """Return each part with the name of its module. Parts that the checkpoint stores fused are rows of one module."""
        parent, dot, attribute = name.rpartition(".")
        if names := [f"{parent}{dot}{part}" for part in fused_projections.get(attribute, ())]:
            return [LinearPart(each, part) for each, part in zip(names, self._parts, strict=True)]
        total, start, found = sum(part.total for part in self._parts), 0, []
        for part in self._parts:
            found.append(LinearPart(name, part.shifted(start, total)))
            start += part.total
        return found

    def prepare(self) -> None:
        assert self._method is not None, "the weights have not been loaded, or `prepare` was called before"
        method, self._method = self._method, None
        self._apply = method.prepare()


class MergedColumnParallelLinear(ReplicatedLinear):
    """Projections of the same input, fused into one GEMM. The output features of each are sharded over the ranks."""

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
        """Set the shapes of the projections.

        Args:
            in_features: input features of all projections.
            out_features: output features of each projection in the whole model.
            build: ranks, kernels and dtype.
            bias: True if the projections have biases.
            silu_and_mul: True to return ``silu(gate) * up`` of two projections. Some kernels compute it in the GEMM's epilogue.
        """
        assert not silu_and_mul or len(out_features) == 2, "silu_and_mul needs two projections: gate and up"
        parts = [Shard.of(n, build.tp_rank, build.tp_size) for n in out_features]
        self._set_shape(parts, Shard.whole(in_features), build, bias=bias, gated=silu_and_mul)


class QKVParallelLinear(ReplicatedLinear):
    """Query, key and value projections, fused into one GEMM and sharded over the ranks by heads.

    If there are more ranks than KV heads, KV heads are replicated: rank r has head ``r * n // tp`` of the model's n.

    Attributes:
        num_q_heads: Hq of this rank.
        num_kv_heads: Hkv of this rank.
        q_rows: this rank's part of the rows of the query projection.
        kv_rows: likewise, of the key projection and of the value projection.
    """

    may_be_quantized = True

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_q_heads: int,
        num_kv_heads: int,
        build: BuildContext,
        *,
        bias: bool = False,
        interleaved_dim: int = 0,
    ) -> None:
        """Set the shapes of the projections.

        Args:
            hidden_size: size of the input.
            head_dim: D.
            num_q_heads: query heads of the whole model.
            num_kv_heads: KV heads of the whole model.
            build: ranks, kernels and dtype.
            bias: True if the projections have biases.
            interleaved_dim: rotary dimension of a checkpoint whose pairs of dimensions are interleaved, as in GLM-4; otherwise 0.
                `heads` returns them half-split, as `RotaryOps.apply_rope` requires. Scores do not depend on the order.

        Raises:
            InvalidValueError: the heads cannot be split over ``build.tp_size`` ranks.
        """
        check_tp_size(num_q_heads, num_kv_heads, build.tp_size)
        first_kv = build.tp_rank * num_kv_heads // build.tp_size
        self.num_q_heads, self.num_kv_heads = num_q_heads // build.tp_size, max(num_kv_heads // build.tp_size, 1)
        kv_start, kv_size = first_kv * head_dim, self.num_kv_heads * head_dim
        self.kv_rows = Shard(kv_start, kv_start + kv_size, kv_size, num_kv_heads * head_dim)
        self.q_rows = Shard.of(num_q_heads * head_dim, build.tp_rank, build.tp_size)
        self._set_shape([self.q_rows, self.kv_rows, self.kv_rows], Shard.whole(hidden_size), build, bias=bias)
        self._order = _half_split(self.num_q_heads, self.num_kv_heads, head_dim, interleaved_dim, build.device)
        self._heads = [self.num_q_heads, self.num_kv_heads, self.num_kv_heads]
        self._view = (-1, sum(self._heads), head_dim)

    def prepare(self) -> None:
        """Prepare the layer's operation from the loaded weights, with the rows of interleaved dimensions half-split."""
        order, method = self._order, self._method
        if order is None or not isinstance(method, PlainLinear):
            super().prepare()
            if order is not None:  # packed weights have no rows that can be moved
                apply = self._apply
                self._apply = lambda x: apply(x).index_select(1, order)
            return
        for rows in (method.weight, *([] if method.bias is None else [method.bias])):
            rows.copy_(rows[order])
        super().prepare()

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, [T, Hq, D], k and v, [T, Hkv, D], for x, [T, hidden_size]."""
        # Tensor.split goes through Python and takes twice as long.
        q, k, v = torch.split_with_sizes(self._apply(x).view(self._view), self._heads, 1)
        return q, k, v


class RowParallelLinear(ReplicatedLinear):
    """Linear layer whose input features are sharded over the ranks. An all-reduce sums the ranks' outputs."""

    may_be_quantized = True

    def __init__(
        self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False, reduce: bool = True
    ) -> None:
        """Set the shape of the weight.

        Args:
            in_features: input features of the layer in the whole model.
            out_features: output features of the layer.
            build: ranks, kernels and dtype.
            bias: True if there is a bias.
            reduce: True if `forward` all-reduces its output. If False, an `RMSNorm` with ``all_reduce=True`` must follow.
        """
        # Only rank 0 adds the bias, since the ranks' outputs are summed.
        owns_bias = bias and build.tp_rank == 0
        self._set_shape(
            [Shard.whole(out_features)], Shard.of(in_features, build.tp_rank, build.tp_size), build, bias=owns_bias
        )
        self._skips_bias = bias and not owns_bias
        self._communicator = build.communicator if reduce and build.tp_size > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, [T, out], for this rank's slice of the input, [T, in / tp]."""
        out = self._apply(x)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield this rank's columns, and the bias. Ranks other than 0 load no elements of it, but the checkpoint must have it."""
        yield from super().weight_targets(name, fused_projections)
        if self._skips_bias:
            yield f"{name}.bias", WeightTarget(torch.empty(0), (slice(0, 0),), shape=(self._parts[0].total,))


def _half_split(num_q: int, num_kv: int, head_dim: int, rotary_dim: int, device: torch.device) -> torch.Tensor | None:
    """Return the row order of q, k and v that changes RoPE from interleaved to half-split pairs; None if `rotary_dim` is 0.

    Only the first `rotary_dim` dimensions of each head of q and k are reordered.
    """
    if not rotary_dim:
        return None
    dims = torch.arange(head_dim, device=device)
    dims[:rotary_dim] = dims[:rotary_dim].view(-1, 2).t().flatten()
    starts = torch.arange(num_q + num_kv, device=device)[:, None] * head_dim
    end = (num_q + num_kv) * head_dim
    return torch.cat(((starts + dims).flatten(), torch.arange(end, end + num_kv * head_dim, device=device)))
