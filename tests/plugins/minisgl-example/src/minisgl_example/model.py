"""Model whose attention and MLP have the same input, the output of one norm, as in PaLM (arXiv 2204.02311)."""

from __future__ import annotations

from typing import ClassVar

import torch

from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_core.layers import (
    Attention,
    CausalLM,
    Layer,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_activation,
)


class ExampleAttention(Layer):
    """Grouped-query attention with rotary embedding."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self.qkv_proj = QKVParallelLinear(hidden, dim, config.num_q_heads, config.num_kv_heads, build)
        self.o_proj = RowParallelLinear(config.num_q_heads * dim, hidden, build, reduce=False)
        self.attn = Attention(index, dim**-0.5, None, build)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return this rank's partial sum, [T, hidden_size], for x, [T, hidden_size]."""
        q, k, v = self.qkv_proj.heads(x)
        return self.o_proj.forward(self.attn.forward(q, k, v, attend, Rope(cos, sin)).flatten(1))


class ExampleMLP(Layer):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        check_activation(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build, silu_and_mul=True)
        self.down_proj = RowParallelLinear(inner, hidden, build, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial sum, [T, hidden_size], for x, [T, hidden_size]."""
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
        """Return the partial sum of attention and MLP, and the residual. The next norm all-reduces both parts at once."""
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
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None,
        intermediate: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Model.forward`. Computes all tokens, and returns those at `logits_index`."""
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
        hidden_states, _ = self.norm.add(x, residual)
        return hidden_states if logits_index is None else hidden_states.index_select(0, logits_index)


class ExampleForCausalLM(CausalLM):
    """Runs with any number of tensor-parallel ranks that divides its heads, because the layers of `minisgl_core` do."""

    decoder: ClassVar = ExampleModel
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
