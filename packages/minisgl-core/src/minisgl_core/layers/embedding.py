"""The vocabulary's two matrices, split over ranks by rows and padded where the vocabulary does not divide."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import VocabShard
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.base import Layer, Shard, empty_parameter
from minisgl_core.layers.linear import ColumnParallelLinear


class VocabParallelEmbedding(Layer):
    """Token embedding. A rank looks up the tokens it holds; the sum over ranks has all of them."""

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext) -> None:
        """Sizes of the whole model."""
        super().__init__()
        self.shard = Shard.of(vocab_size, build)
        self._communicator = build.communicator if build.tp_size > 1 else None
        self._take_rows = build.ops.take_rows
        self.weight = empty_parameter(self.shard.size, hidden_size, build=build, zero=self.shard.is_padded)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids, int32 or int64 [T], to [T, hidden_size]."""
        if self._communicator is None:
            return self._take_rows(self.weight, input_ids)
        local = input_ids - self.shard.start
        elsewhere = (local < 0) | (local >= self.shard.size)
        rows = self._take_rows(self.weight, local.masked_fill_(elsewhere, 0))
        return self._communicator.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """This rank's rows of ``name.weight``."""
        yield f"{name}.weight", self.shard.target(self.weight)


class LMHead(ColumnParallelLinear):
    """Hidden states to logits of the whole vocabulary, on every rank.

    Attributes:
        shard: of which part `op` gives them; None where that is the whole.
    """

    may_be_quantized = False

    def __init__(
        self, vocab_size: int, hidden_size: int, build: BuildContext, tied: VocabParallelEmbedding | None = None
    ) -> None:
        """With `tied`, the embedding's matrix is used and nothing is allocated or loaded."""
        super().__init__(hidden_size, [0 if tied else vocab_size], build)
        self._is_tied = tied is not None
        if tied is not None:
            self.tie(tied)
        self.shard = VocabShard(build.communicator, vocab_size) if build.tp_size > 1 else None

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use another embedding's matrix, where one was used from the beginning."""
        if self._is_tied:
            self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden_size] to [N, vocab_size]."""
        return self.op(x) if self.shard is None else self.shard.gather(self.op(x))
