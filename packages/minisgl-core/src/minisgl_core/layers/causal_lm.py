"""Model of a decoder and an LM head."""

from typing import Any, ClassVar

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.layers.embedding import LMHead


class CausalLM(Model):
    """Model of a decoder, `model`, and an LM head, `lm_head`. The LM head may be tied to the decoder's `embed_tokens`.

    Attributes:
        decoder: class of `model`, or a function that builds it, from the config and the `BuildContext`. Its `forward` has the
            arguments of `Model.forward`. It has a dict `layers` by index, and each of these has an `Attention` at
            ``self_attn.attn``.
    """

    decoder: ClassVar[Any]

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        # From Python 3.14 on, `self.decoder` would bind a functools.partial like a method.
        self.model = type(self).decoder(config, build)
        if self.stage.has_lm_head:
            tied = self.model.embed_tokens if config.tie_embeddings else None
            self.lm_head = LMHead(config.vocab_size, config.hidden_size, build, tied)
            self.vocab_shard = self.lm_head.shard

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden_states: torch.Tensor = self.model.forward(input_ids, positions, attend, logits_index, intermediate)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head.forward(hidden_states)

    def attention_layers(self) -> list[AttentionLayer]:
        return [layer.self_attn.attn.layer for layer in self.model.layers.values()]
