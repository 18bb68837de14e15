"""GLM-4 (arXiv 2406.12793; GLM-4-0414 and later): a norm before and after attention and MLP, and partial RoPE.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
All but the norms and the order of the rotated dimensions is Llama's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.layers import CausalLM, Layer, QKVParallelLinear, RMSNorm
from minisgl_models.config_keys import unsupported_keys, with_defaults
from minisgl_models.llama import LlamaAttention, LlamaMLP, LlamaModel

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


class Glm4Attention(LlamaAttention):
    """`LlamaAttention` with partial RoPE in GPT-J style: adjacent dimensions are rotated together."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build, reduce=True)  # post_self_attn_layernorm needs the whole output
        sizes = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        # `heads` reorders the rotated dimensions to NeoX style (half-split), which Rope expects.
        self.qkv_proj = QKVParallelLinear(*sizes, build, bias=config.qkv_bias, interleaved_dim=config.rope.rotary_dim)


class Glm4DecoderLayer(Layer):
    """Attention and MLP with residual connections, and a norm before and after each."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, build)
        self.self_attn = Glm4Attention(config, index, build)
        self.post_self_attn_layernorm = RMSNorm(hidden, eps, build)
        self.post_attention_layernorm = RMSNorm(hidden, eps, build)
        self.mlp = LlamaMLP(config, build, reduce=True)  # post_mlp_layernorm needs the whole output
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


class Glm4Model(LlamaModel):
    """`LlamaModel` with decoder layers whose outputs are whole, so that the final norm does not all-reduce."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build, Glm4DecoderLayer)
        if self._stage.has_lm_head:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)


class Glm4ForCausalLM(CausalLM):
    """GLM-4 with its LM head."""

    decoder: ClassVar = Glm4Model
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class; `attention_bias` is that of q, k and v."""
        return {**with_defaults(_DEFAULTS, raw), "o_bias": False}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default except partial RoPE, and MLP biases, sliding windows and a soft cap."""
        return unsupported_keys(
            config, partial_rotary=True, mlp_bias=False, sliding_window=None, attn_logit_softcapping=None
        )
