"""Sharding of a dimension over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl_core.contracts.weights import WeightTarget

if TYPE_CHECKING:
    from minisgl_core.contracts.model import BuildContext


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a dimension of `total`. All ranks hold `size`; where it does not divide, the last ones pad.

    Attributes:
        start, stop: the part of the whole that is real, in ``[0, total]``.
        size: what the rank allocates, ``stop - start`` and padding.
        total: the whole.
    """

    start: int
    stop: int
    size: int
    total: int

    @classmethod
    def of(cls, total: int, build: BuildContext) -> Shard:
        """Split evenly, rounded up."""
        size = -(-total // build.tp_size)
        start = min(build.tp_rank * size, total)
        return cls(start, min(start + size, total), size, total)

    @classmethod
    def whole(cls, total: int) -> Shard:
        """Return all of a dimension that is not split."""
        return cls(0, total, total, total)

    @property
    def num_real(self) -> int:
        """Length without padding."""
        return self.stop - self.start

    @property
    def is_padded(self) -> bool:
        """Return whether this rank holds padding."""
        return self.num_real < self.size

    @property
    def index(self) -> slice:
        """Indices of the whole dimension; `slice(None)` for all of it."""
        return slice(None) if self.num_real == self.total else slice(self.start, self.stop)

    def shifted(self, start: int, total: int) -> Shard:
        """Return this part within a tensor of `total` that has the dimension from `start` on, among others."""
        return Shard(start + self.start, start + self.stop, self.size, total)

    def in_blocks(self, size: int) -> Shard:
        """Return the blocks of `size` numbers that cover this part, such as those of its scales."""
        start, stop = self.start // size, -(-self.stop // size) if self.num_real else self.start // size
        return Shard(start, stop, stop - start, -(-self.total // size))


def sharded_target(held: torch.Tensor, *shards: Shard) -> WeightTarget:
    """Return where this rank's part of a checkpoint tensor goes.

    Args:
        held: has `Shard.size` along each of the first dimensions, and the rest whole.
        shards: of the first dimensions.
    """
    whole = tuple(held.shape[len(shards) :])
    for dim, shard in enumerate(shards):
        held = held.narrow(dim, 0, shard.num_real)
    index = [shard.index for shard in shards]
    while len(index) > 1 and index[-1] == slice(None):
        index.pop()
    return WeightTarget(held, tuple(index), shape=(*(shard.total for shard in shards), *whole))
