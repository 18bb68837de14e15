"""A decoder whose attention and MLP read the same normalised input, side by side, as in PaLM (arXiv 2204.02311)."""

from __future__ import annotations

from typing import ClassVar

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_core.layers import (
    Attention,
    Layer,
    LMHead,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)


class ExampleAttention(Layer):
    """Grouped-query attention with rotary embedding."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self.qkv_proj = QKVParallelLinear(hidden, dim, config.num_q_heads, config.num_kv_heads, build)
        self.o_proj = RowParallelLinear(config.num_q_heads * dim, hidden, build, reduce=False)
        self.attn = Attention(index, dim**-0.5, None, build)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [T, hidden_size] to this rank's part of a sum of the same shape."""
        q, k, v = self.qkv_proj.heads(x)
        return self.o_proj.forward(self.attn.forward(q, k, v, attend, Rope(cos, sin)).flatten(1))


class ExampleMLP(Layer):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build, silu_and_mul=True)
        self.down_proj = RowParallelLinear(inner, hidden, build, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to this rank's part of a sum of the same shape."""
        return self.down_proj.forward(self.gate_up_proj.forward(x))


class ExampleBlock(Layer):
    """``x + attention(norm(x)) + mlp(norm(x))``."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build, all_reduce=True)
        self.self_attn = ExampleAttention(config, index, build)
        self.mlp = ExampleMLP(config, build)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts are added before the next norm all-reduces them, so a block costs one all-reduce."""
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.forward(x, cos, sin, attend) + self.mlp.forward(x), residual


class ExampleModel(Layer):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.layers = {index: ExampleBlock(config, index, build) for index in stage.layers}
        if stage.has_lm_head:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build, all_reduce=True)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, intermediate: torch.Tensor | None
    ) -> torch.Tensor:
        """[T] and [T] to [T, hidden_size]; between pipeline stages to and from [2, T, hidden_size]."""
        cos, sin = self.rotary_emb.forward(positions)
        if intermediate is None:
            x, residual = self.embed_tokens.forward(input_ids), None
        else:
            x, residual = intermediate.unbind(0)
        for layer in self.layers.values():
            x, residual = layer.forward(x, residual, cos, sin, attend)
        if not self._stage.has_lm_head:
            assert residual is not None, "a stage has at least one layer"
            return torch.stack((x, residual))
        return self.norm.add(x, residual)[0]


class ExampleForCausalLM(Model):
    """Runs at any tensor-parallel size, because the layers of `minisgl_core` do."""

    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.model = ExampleModel(config, build)
        if self.stage.has_lm_head:
            self.lm_head = LMHead(config.vocab_size, config.hidden_size, build)
            self.vocab_shard = self.lm_head.shard

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Model.forward`. Computes all tokens, and returns those that are wanted."""
        hidden_states = self.model.forward(input_ids, positions, attend, intermediate)
        return hidden_states if logits_index is None else hidden_states.index_select(0, logits_index)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        return self.lm_head.forward(hidden_states)

    def attention_layers(self) -> list[AttentionLayer]:
        """See `Model.attention_layers`."""
        return [layer.self_attn.attn.layer for layer in self.model.layers.values()]
