"""Token embedding and output matrix, split over ranks by rows and padded where the vocabulary does not divide."""

from __future__ import annotations

import torch

from minisgl_core.contracts.layer import Layer, PackedModules, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import VocabShard
from minisgl_core.contracts.shard import sharded_target
from minisgl_core.layers.base import Shard, empty_parameter
from minisgl_core.layers.linear import MergedColumnParallelLinear


class VocabParallelEmbedding(Layer):
    """Token embedding. A rank looks up the tokens that it holds, and an all-reduce brings them together."""

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext) -> None:
        """Sizes of the whole model."""
        self._shard = Shard.of(vocab_size, build)
        self._communicator = build.communicator if build.tp_size > 1 else None
        self._gather_rows = build.ops.step.gather_rows
        self.weight = empty_parameter(self._shard.size, hidden_size, build=build, zero=self._shard.is_padded)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids, int32 or int64 [T], to [T, hidden_size]."""
        if self._communicator is None:
            return self._gather_rows(self.weight, input_ids)
        local = input_ids - self._shard.start
        elsewhere = (local < 0) | (local >= self._shard.size)
        rows = self._gather_rows(self.weight, local.masked_fill_(elsewhere, 0))
        return self._communicator.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's rows."""
        yield f"{name}.weight", sharded_target(self.weight, self._shard)


class LMHead(MergedColumnParallelLinear):
    """Hidden states to this rank's part of the logits.

    Attributes:
        shard: the part of the vocabulary that `forward` returns logits of; None for all of it.
    """

    may_be_quantized = False

    def __init__(
        self, vocab_size: int, hidden_size: int, build: BuildContext, tied: VocabParallelEmbedding | None = None
    ) -> None:
        """With `tied`, use the embedding's weight; nothing is allocated or loaded."""
        super().__init__(hidden_size, [vocab_size], build)
        self._tied, self._ops = tied, build.ops
        self.shard = VocabShard(build.communicator, vocab_size) if build.tp_size > 1 else None

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's rows, unless they are the embedding's."""
        return iter(()) if self._tied else super().weight_targets(name, packed)

    def prepare(self) -> None:
        """Hand the weight to the kernels."""
        if self._tied is None:
            super().prepare()
        else:
            self._apply = self._ops.linear.prepare_linear(self._tied.weight.detach(), None)
