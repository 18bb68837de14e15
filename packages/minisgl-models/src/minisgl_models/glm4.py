"""GLM-4 (arXiv 2406.12793; GLM-4-0414 and later): a norm before and after attention and MLP, and partial RoPE.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
`docs/plugins/model.md` walks through granite.py, a file like this one.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

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
from minisgl_models.config_keys import unsupported_keys, with_defaults

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


class Glm4Attention(Layer):
    """Grouped-query attention with partial RoPE in GPT-J style: adjacent dimensions are rotated together."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """Build the layers. `index` is the index of the decoder layer."""
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        rotary_dim = config.rope.rotary_dim
        # `heads` reorders the rotated dimensions to NeoX style (half-split), which Rope expects.
        self.qkv_proj = QKVParallelLinear(
            hidden, dim, num_q, num_kv, build, bias=config.qkv_bias, interleaved_dim=rotary_dim
        )
        # It all-reduces, since post_self_attn_layernorm needs the whole output.
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build)
        self.attn = Attention(index, dim**-0.5, config.sliding_windows[index], build)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map [T, H] to [T, H], or to [N, H] for the tokens at `logits_index`."""
        q, k, v = self.qkv_proj.heads(hidden_states)
        # If the backend supports it, RoPE and KV store are one kernel, or part of the attention kernel.
        attn_output = self.attn.forward(q, k, v, attend, Rope(cos, sin))
        if logits_index is not None:
            attn_output = attn_output.index_select(0, logits_index)
        return self.o_proj.forward(attn_output.flatten(1))


class Glm4MLP(Layer):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        check_activation(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        # One GEMM. Some kernels apply the activation in its epilogue.
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build, silu_and_mul=True)
        # It all-reduces, since post_mlp_layernorm needs the whole output.
        self.down_proj = RowParallelLinear(inner, hidden, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.down_proj.forward(self.gate_up_proj.forward(x))


class Glm4DecoderLayer(Layer):
    """Attention and MLP with residual connections, and a norm before and after each."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, build)
        self.self_attn = Glm4Attention(config, index, build)
        self.post_self_attn_layernorm = RMSNorm(hidden, eps, build)
        self.post_attention_layernorm = RMSNorm(hidden, eps, build)
        self.mlp = Glm4MLP(config, build)
        self.post_mlp_layernorm = RMSNorm(hidden, eps, build)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's normalized output, which the next norm adds to the residual, and the residual."""
        hidden_states, residual = self.input_layernorm.add(hidden_states, residual)
        hidden_states = self.self_attn.forward(hidden_states, cos, sin, attend, logits_index)
        hidden_states = self.post_self_attn_layernorm.forward(hidden_states)
        if logits_index is not None:
            residual = residual.index_select(0, logits_index)
        hidden_states, residual = self.post_attention_layernorm.add(hidden_states, residual)
        return self.post_mlp_layernorm.forward(self.mlp.forward(hidden_states)), residual


class Glm4Model(Layer):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.layers = {index: Glm4DecoderLayer(config, index, build) for index in stage.layers}
        if stage.has_lm_head:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None,
        intermediate: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return hidden states, [T, H], or [N, H] for the tokens at `logits_index`.

        Between pipeline stages, `intermediate` and the result are hidden states and residual, [2, T, H].
        """
        cos, sin = self.rotary_emb.forward(positions)
        if intermediate is None:
            hidden_states, residual = self.embed_tokens.forward(input_ids), None
        else:
            hidden_states, residual = intermediate.unbind(0)
        *layers, last = self.layers.values()
        for layer in layers:
            hidden_states, residual = layer.forward(hidden_states, residual, cos, sin, attend)
        # After the last attention, only the tokens whose logits are computed are needed.
        hidden_states, residual = last.forward(hidden_states, residual, cos, sin, attend, logits_index)
        if not self._stage.has_lm_head:
            return torch.stack((hidden_states, residual))
        return self.norm.add(hidden_states, residual)[0]


class Glm4ForCausalLM(CausalLM):
    """GLM-4 with its LM head."""

    decoder: ClassVar = Glm4Model
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class."""
        return with_defaults(_DEFAULTS, raw)

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, biases of the MLP, sliding windows and a soft cap."""
        return unsupported_keys(
            config, partial_rotary=True, mlp_bias=False, sliding_window=None, attn_logit_softcapping=None
        )
