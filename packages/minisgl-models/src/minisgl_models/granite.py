"""Granite 3 (IBM): Llama with factors on embeddings, scores, residual additions and logits.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
`docs/plugins/model.md` walks through this file.
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

_FACTORS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


class GraniteAttention(Layer):
    """Grouped-query attention with rotary embedding; `attention_multiplier` scales the scores."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """Build the layers. `index` is the index of the decoder layer."""
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(hidden, dim, num_q, num_kv, build, bias=config.qkv_bias)
        # Its all-reduce is fused into post_attention_layernorm.
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build, bias=config.o_bias, reduce=False)
        self.attn = Attention(index, config.raw["attention_multiplier"], config.sliding_windows[index], build)

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


class GraniteMLP(Layer):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        check_activation(config)
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        # One GEMM. Some kernels apply the activation in its epilogue.
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build, bias=bias, silu_and_mul=True)
        # Its all-reduce is fused into the next layer's input_layernorm, or the final norm.
        self.down_proj = RowParallelLinear(inner, hidden, build, bias=bias, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.down_proj.forward(self.gate_up_proj.forward(x))


class GraniteDecoderLayer(Layer):
    """Pre-norm attention and MLP, whose outputs are scaled before the residual add."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        self.self_attn = GraniteAttention(config, index, build)
        self.post_attention_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        self.mlp = GraniteMLP(config, build)
        self._multiplier: float = config.raw["residual_multiplier"]

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output, which the next norm adds to the residual, and the residual."""
        hidden_states, residual = self.input_layernorm.add(hidden_states, residual)
        hidden_states = self.self_attn.forward(hidden_states, cos, sin, attend, logits_index) * self._multiplier
        if logits_index is not None:
            residual = residual.index_select(0, logits_index)
        hidden_states, residual = self.post_attention_layernorm.add(hidden_states, residual)
        return self.mlp.forward(hidden_states) * self._multiplier, residual


class GraniteModel(Layer):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.layers = {index: GraniteDecoderLayer(config, index, build) for index in stage.layers}
        if stage.has_lm_head:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build, all_reduce=True)
        self._multiplier: float = config.raw["embedding_multiplier"]

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
            hidden_states, residual = self.embed_tokens.forward(input_ids) * self._multiplier, None
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


class GraniteForCausalLM(CausalLM):
    """Granite with its LM head."""

    decoder: ClassVar = GraniteModel
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the factors that the config leaves out."""
        return with_defaults(dict.fromkeys(_FACTORS, 1.0), raw)

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default, and sliding windows and a soft cap."""
        return unsupported_keys(config, sliding_window=None, attn_logit_softcapping=None)

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self._scaling: float = config.raw["logits_scaling"]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states) / self._scaling
