"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP instead of before, and norms of all query and all key heads.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
The MLP is Llama's.
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
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    ShardedRMSNorm,
    VocabParallelEmbedding,
)
from minisgl_models.config_keys import unsupported_keys, with_defaults
from minisgl_models.llama import LlamaMLP


class Olmo2Attention(Layer):
    """Grouped-query attention with rotary embedding, after one RMSNorm over all heads of q and one over all heads of k."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """Build the layers. `index` is the index of the decoder layer."""
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(hidden, dim, num_q, num_kv, build, bias=config.qkv_bias)
        self.q_norm = ShardedRMSNorm(self.qkv_proj.q_rows, config.rms_norm_eps, build)
        self.k_norm = ShardedRMSNorm(self.qkv_proj.kv_rows, config.rms_norm_eps, build)
        # It all-reduces, since post_attention_layernorm needs the whole output.
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build, bias=config.o_bias)
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
        q, k = (norm.forward(x.flatten(1)).view(x.shape) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        # If the backend supports it, RoPE and KV store are one kernel, or part of the attention kernel.
        attn_output = self.attn.forward(q, k, v, attend, Rope(cos, sin))
        if logits_index is not None:
            attn_output = attn_output.index_select(0, logits_index)
        return self.o_proj.forward(attn_output.flatten(1))


class Olmo2DecoderLayer(Layer):
    """Attention and MLP with residual connections; their outputs are normalized, not their inputs."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        self.self_attn = Olmo2Attention(config, index, build)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.mlp = LlamaMLP(config, build, reduce=True)  # post_feedforward_layernorm needs the whole output
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the residual stream, [T, H] or [N, H]."""
        attn_output = self.self_attn.forward(hidden_states, cos, sin, attend, logits_index)
        if logits_index is not None:
            hidden_states = hidden_states.index_select(0, logits_index)
        hidden_states = hidden_states + self.post_attention_layernorm.forward(attn_output)
        return hidden_states + self.post_feedforward_layernorm.forward(self.mlp.forward(hidden_states))


class Olmo2Model(Layer):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.layers = {index: Olmo2DecoderLayer(config, index, build) for index in stage.layers}
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

        Between pipeline stages, `intermediate` and the result are hidden states, [1, T, H].
        """
        cos_sin = self.cos_sin(positions)
        hidden_states = self.embed_tokens.forward(input_ids) if intermediate is None else intermediate[0]
        *layers, last = self.layers.values()
        for layer, (cos, sin) in zip(layers, cos_sin, strict=False):
            hidden_states = layer.forward(hidden_states, cos, sin, attend)
        # After the last attention, only the tokens whose logits are computed are needed.
        hidden_states = last.forward(hidden_states, *cos_sin[-1], attend, logits_index)
        return self.norm.forward(hidden_states) if self._stage.has_lm_head else hidden_states[None]

    def cos_sin(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cos and sin of the positions for each layer. OLMo 3 has others in layers with a sliding window."""
        return [self.rotary_emb.forward(positions)] * len(self.layers)


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2 with its LM head."""

    decoder: ClassVar = Olmo2Model
    num_intermediate: ClassVar = 1
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class that are not Llama's."""
        return with_defaults({"rms_norm_eps": 1e-5}, raw)

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, biases of the MLP, sliding windows and a soft cap."""
        return unsupported_keys(config, mlp_bias=False, sliding_window=None, attn_logit_softcapping=None)
