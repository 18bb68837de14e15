"""Shards of a dimension over tensor-parallel ranks, and sizes that split a model's heads.

This imports no torch, so that a launcher checks ``--tp`` quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import InvalidValueError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's shard of a dimension. All ranks allocate `size`; if the split is uneven, the last ranks have padding.

    Attributes:
        start, stop: range of the whole dimension that this rank holds.
        size: allocated length, ``stop - start`` plus padding.
        total: length of the whole dimension.
    """

    start: int
    stop: int
    size: int
    total: int

    @classmethod
    def of(cls, total: int, tp_rank: int, tp_size: int) -> Shard:
        """Return the shard of a rank if `total` is split evenly over the tensor-parallel ranks, rounded up."""
        size = -(-total // tp_size)
        start = min(tp_rank * size, total)
        return cls(start, min(start + size, total), size, total)

    @classmethod
    def whole(cls, total: int) -> Shard:
        """Return the shard of a dimension that is not split."""
        return cls(0, total, total, total)

    @property
    def unpadded_size(self) -> int:
        """Length without padding."""
        return self.stop - self.start

    @property
    def is_padded(self) -> bool:
        """Return True if this rank has padding."""
        return self.unpadded_size < self.size

    @property
    def index(self) -> slice:
        """Slice of the whole dimension that this rank holds; `slice(None)` for all of it."""
        return slice(None) if self.unpadded_size == self.total else slice(self.start, self.stop)

    def shifted(self, start: int, total: int) -> Shard:
        """Return this shard as a part of a fused dimension of `total`, in which the sharded dimension begins at `start`."""
        return Shard(start + self.start, start + self.stop, self.size, total)

    def in_blocks(self, size: int) -> Shard:
        """Return the shard counted in blocks of `size` elements, such as the shard of block scales."""
        start = self.start // size
        stop = -(-self.stop // size) if self.unpadded_size else start
        return Shard(start, stop, stop - start, -(-self.total // size))


def sharded_target(tensor: torch.Tensor, *shards: Shard) -> WeightTarget:
    """Return the target of a checkpoint tensor's shard on this rank.

    Args:
        tensor: this rank's tensor: `Shard.size` elements along each sharded dimension, and all of the others.
        shards: shards of the first dimensions.
    """
    unsharded = tuple(tensor.shape[len(shards) :])
    for dim, shard in enumerate(shards):
        tensor = tensor.narrow(dim, 0, shard.unpadded_size)
    index = [shard.index for shard in shards]
    while len(index) > 1 and index[-1] == slice(None):  # trailing dimensions that are whole need no slice
        index.pop()
    return WeightTarget(tensor, tuple(index), shape=(*(shard.total for shard in shards), *unsharded))


def splits_heads(num_q_heads: int, num_kv_heads: int, tp_size: int) -> bool:
    """Return True if `tp_size` ranks split the query heads evenly, and split or replicate the KV heads evenly."""
    return num_q_heads % tp_size == 0 and (num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0)


def allowed_tp_sizes(num_q_heads: int, num_kv_heads: int) -> list[int]:
    """Return all sizes for which `splits_heads` is True."""
    return [size for size in range(1, num_q_heads + 1) if splits_heads(num_q_heads, num_kv_heads, size)]


def check_tp_size(num_q_heads: int, num_kv_heads: int, tp_size: int) -> None:
    """Check that the model's heads can be split over `tp_size` ranks.

    Raises:
        InvalidValueError: they cannot. The message lists the allowed values of ``--tp``.
    """
    if not splits_heads(num_q_heads, num_kv_heads, tp_size):
        allowed = ", ".join(map(str, allowed_tp_sizes(num_q_heads, num_kv_heads)))
        heads = f"{num_q_heads} query heads, {num_kv_heads} KV heads"
        raise InvalidValueError("--tp", tp_size, f"one of {allowed} for this model ({heads})")
