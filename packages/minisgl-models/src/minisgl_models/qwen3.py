"""Qwen3, dense (arXiv 2505.09388): Llama with RMSNorm of each query and key head (QK norm).

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
All but the attention is Llama's.
"""

from typing import ClassVar

import torch

from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_core.layers import Attention, CausalLM, Layer, QKVParallelLinear, RMSNorm, RowParallelLinear
from minisgl_models.config_keys import unsupported_keys
from minisgl_models.llama import LlamaDecoderLayer, LlamaModel


class Qwen3Attention(Layer):
    """Grouped-query attention with QK norms and rotary embedding."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """Build the layers. `index` is the index of the decoder layer."""
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(hidden, dim, num_q, num_kv, build, bias=config.qkv_bias)
        # Its all-reduce is fused into post_attention_layernorm.
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build, bias=config.o_bias, reduce=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, build)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, build)
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
        # If the backend supports it, norms, RoPE and KV store are one kernel, or part of the attention kernel.
        rope = Rope(cos, sin, (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps)
        attn_output = self.attn.forward(q, k, v, attend, rope)
        if logits_index is not None:
            attn_output = attn_output.index_select(0, logits_index)
        return self.o_proj.forward(attn_output.flatten(1))


class Qwen3DecoderLayer(LlamaDecoderLayer):
    """`LlamaDecoderLayer` with QK norms."""

    attention: ClassVar = Qwen3Attention


class Qwen3Model(LlamaModel):
    """`LlamaModel` with QK norms."""

    decoder_layer: ClassVar = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with its LM head."""

    decoder: ClassVar = Qwen3Model
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, and biases of the MLP."""
        return unsupported_keys(config, mlp_bias=False)
