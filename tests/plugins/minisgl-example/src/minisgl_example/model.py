"""A decoder whose attention and MLP read the same normalised input, side by side, as in PaLM (arXiv 2204.02311)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.attention import Attention
from minisgl_core.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl_core.layers.mlp import GatedMLP
from minisgl_core.layers.norm import RMSNorm
from minisgl_core.layers.rotary import RotaryCache


class Block(nn.Module):
    """``x + attention(norm(x)) + mlp(norm(x))``."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """The model's layer number `index`."""
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.attention = Attention(config, index, build)
        self.mlp = GatedMLP(config, build)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [T, hidden_size] to the same."""
        normed = self.norm(x)
        out: torch.Tensor = x + self.attention(normed, cos, sin, attend) + self.mlp(normed)
        return out


class ExampleForCausalLM(Model):
    """Runs at any tensor-parallel size, because the layers of `minisgl_core` do."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Allocate embedding, blocks, norm and output matrix."""
        super().__init__(config, build)
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary = RotaryCache(config.rope, config.max_position, build)
        self.blocks = [Block(config, index, build) for index in range(config.num_layers)]
        self.modules_of_blocks = nn.ModuleList(self.blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, build)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """See `Model.forward`."""
        cos, sin = self.rotary(positions)
        x: torch.Tensor = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def attention_layers(self) -> list[AttentionLayer]:
        """See `Model.attention_layers`."""
        return [block.attention.layer for block in self.blocks]

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Under the names that Hugging Face's Llama uses."""
        yield from self.embedding.weight_targets("model.embed_tokens")
        for index, block in enumerate(self.blocks):
            yield from block.norm.weight_targets(f"model.layers.{index}.input_layernorm")
            yield from block.attention.weight_targets(f"model.layers.{index}.self_attn")
            yield from block.mlp.weight_targets(f"model.layers.{index}.mlp")
        yield from self.norm.weight_targets("model.norm")
        yield from self.lm_head.weight_targets("lm_head")
