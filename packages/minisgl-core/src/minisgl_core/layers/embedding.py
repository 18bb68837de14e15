"""Token embedding and LM head, sharded over ranks by vocabulary, which is padded if it is not divisible."""

import torch

from minisgl_core.contracts.layer import FusedProjections, Layer, Targets
from minisgl_core.contracts.layer_methods import EmbeddingMethod, EmbeddingOp, LinearMethod, LinearPart, LinearSpec
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import VocabShard
from minisgl_core.contracts.shard import Shard, sharded_target
from minisgl_core.layers.base import empty_parameter
from minisgl_core.layers.linear import MergedColumnParallelLinear


class VocabParallelEmbedding(Layer):
    """Token embedding. Each rank looks up the tokens of its shard, and an all-reduce sums the ranks' results."""

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext) -> None:
        """Allocate this rank's rows of a weight [vocab_size, hidden_size]."""
        self._shard = Shard.of(vocab_size, build.tp_rank, build.tp_size)
        self._communicator = build.communicator if build.tp_size > 1 else None
        self._gather_rows = build.ops.step.gather_rows
        self.weight = empty_parameter(self._shard.size, hidden_size, build=build, zero=self._shard.is_padded)
        self._quantization, self._columns = build.quantization, Shard.whole(hidden_size)
        self._method: EmbeddingMethod | None = None
        self._packed: EmbeddingOp | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, [T, hidden_size], of input_ids, int32 or int64 [T]."""
        if self._communicator is None:
            return self._rows(input_ids)
        local = input_ids - self._shard.start
        elsewhere = (local < 0) | (local >= self._shard.size)
        rows = self._rows(local.masked_fill_(elsewhere, 0))
        return self._communicator.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield this rank's rows. If the quantization packs them, `weight` is dropped."""
        if self._method is None and self._quantization is not None:
            dtype, device = self._quantization.spec.dtype, self._quantization.spec.device
            parts = (LinearPart(name, self._shard),)
            spec = LinearSpec(name, parts, self._columns, bias=False, gated=False, dtype=dtype, device=device)
            self._method = self._quantization.embedding(spec)
        if self._method is None:
            yield f"{name}.weight", sharded_target(self.weight, self._shard)
            return
        vars(self).pop("weight", None)
        yield from self._method.targets()

    def packed(self) -> EmbeddingOp | None:
        """Return the operations of a packed weight, prepared by the first call; None for a weight in the model's dtype."""
        if self._method is not None:
            method, self._method, self._quantization = self._method, None, None
            self._packed = method.prepare()
        return self._packed

    def prepare(self) -> None:
        self.packed()

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._gather_rows(self.weight, ids) if self._packed is None else self._packed.rows(ids)


class LMHead(MergedColumnParallelLinear):
    """Linear layer from hidden states to this rank's shard of the logits.

    Attributes:
        shard: shard of the vocabulary whose logits `forward` returns; None for the whole vocabulary.
    """

    may_be_quantized = False  # `Quantization.embedding` may quantize it, `Quantization.linear` not

    def __init__(
        self, vocab_size: int, hidden_size: int, build: BuildContext, tied: VocabParallelEmbedding | None = None
    ) -> None:
        """Set the shape of the weight. If `tied` is given, its weight is used, and nothing is allocated or loaded."""
        super().__init__(hidden_size, [vocab_size], build)
        self._tied, self._ops, self._embedding_provider = tied, build.ops, build.quantization
        self.shard = VocabShard(build.communicator, vocab_size) if build.tp_size > 1 else None

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield this rank's rows, or nothing if the weight is tied to the embedding."""
        return iter(()) if self._tied else super().weight_targets(name, fused_projections)

    def _make_method(self, spec: LinearSpec) -> LinearMethod:
        packed = None if self._embedding_provider is None else self._embedding_provider.embedding(spec)
        return packed or super()._make_method(spec)

    def prepare(self) -> None:
        """Prepare the GEMM with the loaded weight, or with the embedding's weight if that is tied."""
        if self._tied is None:
            super().prepare()
        else:
            packed = self._tied.packed()
            self._apply = packed or self._ops.linear.prepare_linear(self._tied.weight.detach(), None)
