"""The decoder that Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE share; an architecture subclasses it and states what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol, cast

import torch
from torch import nn

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.ops import Rotation, VocabShard
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.attention import Attention
from minisgl_core.layers.base import Layer, SumOverRanks
from minisgl_core.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl_core.layers.linear import Targets
from minisgl_core.layers.mlp import GatedMLP
from minisgl_core.layers.moe import SparseMoeMLP
from minisgl_core.layers.norm import RMSNorm
from minisgl_core.layers.rotary import RotaryCache


class MLP(Protocol):
    """What a `DecoderLayer` takes for its MLP: a module, such as a `Layer`, with weights."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to the same, on every rank."""

    def weight_targets(self, name: str) -> Targets:
        """The checkpoint's tensors under `name`."""


class DecoderLayer(Layer):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, attention: Attention, mlp: MLP, config: ModelConfig, build: BuildContext) -> None:
        """`attention` and `mlp` are this layer's; their names in a checkpoint are ``self_attn`` and ``mlp``."""
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.attention = attention
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.mlp = mlp

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``, whose sum the next norm computes; both [T, hidden_size], None in the first layer.

        With `rows` (int32 [N]), what comes after attention is done for these tokens alone.
        """
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        if rows is not None:
            attend, residual = _of_rows(attend, rows), residual.index_select(0, rows)
        x, residual = self.post_attention_norm.add(self.attention(x, cos, sin, attend), residual)
        return self.mlp(x), residual

    def weight_targets(self, name: str) -> Targets:
        """Under Hugging Face's names."""
        yield from self.input_norm.weight_targets(f"{name}.input_layernorm")
        yield from self.attention.weight_targets(f"{name}.self_attn")
        yield from self.post_attention_norm.weight_targets(f"{name}.post_attention_layernorm")
        yield from self.mlp.weight_targets(f"{name}.mlp")


def _of_rows(attend: Attend, rows: torch.Tensor) -> Attend:
    """Attention of a whole step, whose output is wanted of some tokens."""

    def attend_rows(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        return attend(q, k, v, layer, rotation).index_select(0, rows)

    return attend_rows


class DecoderModel(Model):
    """Embedding, decoder layers, norm and output matrix.

    Attributes:
        qk_norm: whether queries and keys are normalised a head at a time before the rotation.
        has_experts: whether the architecture knows MoE layers.
    """

    qk_norm: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """A config with experts where the architecture has none, or the other way round."""
        if (config.moe is not None) == cls.has_experts:
            return []
        return [f"{cls.__name__} {'needs' if cls.has_experts else 'has no'} experts (num_experts in the config)"]

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self._dtype, self._selects_rows = build.dtype, False
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary = RotaryCache(config.rope, config.max_position, build)
        self._layers = [self.build_layer(index, build) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        tied = self.embedding if config.tie_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, build, tied)

    def build_layer(self, index: int, build: BuildContext) -> DecoderLayer:
        """One decoder layer; override it for other attention or another MLP."""
        attention = Attention(self.config, index, build, qk_norm=self.qk_norm)
        sparse = self.config.moe is not None and index not in self.config.moe.dense_layers
        mlp = SparseMoeMLP(self.config, build) if sparse else GatedMLP(self.config, build)
        return DecoderLayer(attention, mlp, self.config, build)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """See `Model.forward`."""
        return self._run(input_ids, positions, attend, None)

    def forward_rows(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor
    ) -> torch.Tensor:
        """See `Model.forward_rows`."""
        if self._selects_rows:
            return self._run(input_ids, positions, attend, rows)
        return super().forward_rows(input_ids, positions, attend, rows)

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor | None
    ) -> torch.Tensor:
        cos, sin = self.rotary(positions)
        x, residual = self.embedding(input_ids), None
        for layer in self._layers[:-1]:
            x, residual = layer(x, residual, cos, sin, attend)
        selected = () if rows is None else (rows,)  # another layer's forward may not know them
        x, residual = self._layers[-1](x, residual, cos, sin, attend, *selected)
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def vocab_shard(self) -> VocabShard | None:
        """See `Model.vocab_shard`. Another `compute_logits`, or another head's `forward`, may do more than multiply."""
        is_plain = (
            type(self).compute_logits is DecoderModel.compute_logits and type(self.lm_head).forward is LMHead.forward
        )
        return self.lm_head.shard if is_plain else None

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_own_logits`."""
        return self.compute_logits(hidden) if self.vocab_shard() is None else self.lm_head.op(hidden)

    def attention_layers(self) -> list[AttentionLayer]:
        """See `Model.attention_layers`."""
        return [layer.attention.layer for layer in self._listed()]

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """See `Model.weight_targets`."""
        yield from self.embedding.weight_targets("model.embed_tokens")
        for index, layer in enumerate(self._listed()):
            yield from layer.weight_targets(f"model.layers.{index}")
        yield from self.norm.weight_targets("model.norm")
        if not self.config.tie_embeddings:
            yield from self.lm_head.weight_targets("lm_head")

    def ignored_weights(self) -> tuple[str, ...]:
        """A tied checkpoint may hold the output matrix all the same."""
        return (*super().ignored_weights(), *(("lm_head.weight",) if self.config.tie_embeddings else ()))

    def finalize(self) -> None:
        """See `Model.finalize`. Norms sum over the ranks from here on: only now are all of a subclass's parts in place."""
        self._layers = self._listed()
        pairs = self._sums_and_norms()
        for last_sum, norm in pairs:
            last_sum.is_left, norm.sums = True, last_sum.communicator
        self._selects_rows = not pairs and self._ends_plainly()
        if isinstance(self.lm_head, LMHead):
            self.lm_head.tie(self.embedding)
        super().finalize()

    def _listed(self) -> list[DecoderLayer]:
        """The layers as they are now; `_layers`, quicker to go over, has them from `finalize` on."""
        return [cast(DecoderLayer, layer) for layer in self.layers]

    def _ends_plainly(self) -> bool:
        """Whether all that the last layer does after attention, it does for each token apart."""
        last = self._layers[-1]
        return (
            type(self).forward is DecoderModel.forward
            and type(last).forward is DecoderLayer.forward
            and type(last.attention).forward is Attention.forward
        )

    def _sums_and_norms(self) -> list[tuple[SumOverRanks, RMSNorm]]:
        """Each layer's two sums over the ranks and the norms that may do them; empty where one of them is not to be left.

        All or none: a norm that sums may leave the residual to the next norm's sum, up to date in some rows alone.
        """
        # Another forward may do more with a sum.
        if type(self).forward is not DecoderModel.forward:
            return []
        if any(type(each).forward is not DecoderLayer.forward for each in self._layers):
            return []
        following = [*(each.input_norm for each in self._layers[1:]), self.norm]
        pairs: list[tuple[SumOverRanks, RMSNorm]] = []
        for layer, next_norm in zip(self._layers, following, strict=True):
            for part, norm in ((layer.attention, layer.post_attention_norm), (layer.mlp, next_norm)):
                last_sum = part.last_sum() if isinstance(part, Layer) else None
                is_plain = type(norm).add is RMSNorm.add and norm.weight.dtype == self._dtype
                if last_sum is None or not is_plain:
                    return []
                pairs.append((last_sum, norm))
        return pairs
