"""Gemma 2 (arXiv 2408.00118): windows in every other layer, soft caps, and a norm before and after attention and MLP.

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
)
from minisgl_models.config_keys import unsupported_keys, whole_number, with_defaults

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def gemma_norm(size: int, config: ModelConfig, build: BuildContext) -> RMSNorm:
    """Return a norm that multiplies by ``1 + weight``."""
    return RMSNorm(size, config.rms_norm_eps, build, weight_offset=1.0)


class Gemma2Attention(Layer):
    """Grouped-query attention with rotary embedding; `query_pre_attn_scalar` scales the scores, which may be soft-capped."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """Build the layers. `index` is the index of the decoder layer."""
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(hidden, dim, num_q, num_kv, build, bias=config.qkv_bias)
        # It all-reduces, since post_attention_layernorm needs the whole output.
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build, bias=config.o_bias)
        scale = config.raw["query_pre_attn_scalar"] ** -0.5
        self.attn = Attention(index, scale, config.sliding_windows[index], build, soft_cap=config.soft_cap)

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
        attn_output = self.attn.forward(q, k, v, attend, Rope(cos, sin))
        if logits_index is not None:
            attn_output = attn_output.index_select(0, logits_index)
        return self.o_proj.forward(attn_output.flatten(1))


class Gemma2MLP(Layer):
    """``down(gelu(gate(x)) * up(x))`` (arXiv 2002.05202), with the tanh approximation of GELU."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build)
        self._gelu_tanh_and_mul = build.ops.norm.gelu_tanh_and_mul
        # It all-reduces, since post_feedforward_layernorm needs the whole output.
        self.down_proj = RowParallelLinear(inner, hidden, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.down_proj.forward(self._gelu_tanh_and_mul(self.gate_up_proj.forward(x)))


class Gemma2DecoderLayer(Layer):
    """Attention and MLP with residual connections, and a norm before and after each.

    Attributes:
        attention: class of the attention, which Gemma 3 replaces.
    """

    attention: ClassVar[type[Any]] = Gemma2Attention

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        self.input_layernorm = gemma_norm(config.hidden_size, config, build)
        self.self_attn = self.attention(config, index, build)
        self.post_attention_layernorm = gemma_norm(config.hidden_size, config, build)
        self.pre_feedforward_layernorm = gemma_norm(config.hidden_size, config, build)
        self.mlp = Gemma2MLP(config, build)
        self.post_feedforward_layernorm = gemma_norm(config.hidden_size, config, build)

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
        hidden_states = self.post_attention_layernorm.forward(hidden_states)
        if logits_index is not None:
            residual = residual.index_select(0, logits_index)
        hidden_states, residual = self.pre_feedforward_layernorm.add(hidden_states, residual)
        return self.post_feedforward_layernorm.forward(self.mlp.forward(hidden_states)), residual


class Gemma2Model(Layer):
    """Scaled embedding, decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.layers = {index: Gemma2DecoderLayer(config, index, build) for index in stage.layers}
        if stage.has_lm_head:
            self.norm = gemma_norm(config.hidden_size, config, build)
        # transformers rounds the factor to the model's dtype, and the model was trained with the rounded one.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=build.dtype))

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
            hidden_states, residual = self.embed_tokens.forward(input_ids) * self._embedding_scale, None
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


class Gemma2ForCausalLM(CausalLM):
    """Gemma 2 with its LM head."""

    decoder: ClassVar = Gemma2Model
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class; every other layer has a window."""
        config = with_defaults(_DEFAULTS, raw)
        kinds = [
            "full_attention" if i % 2 else "sliding_attention"
            for i in range(whole_number(config, "num_hidden_layers", 1))
        ]
        activation = config["hidden_activation"] or _DEFAULTS["hidden_activation"]
        return {**config, "layer_types": config.get("layer_types") or kinds, "hidden_act": activation}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse other activations, bidirectional attention, biases of the MLP, and experts."""
        return unsupported_keys(
            config,
            hidden_activation=_DEFAULTS["hidden_activation"],
            use_bidirectional_attention=False,
            use_sliding_window=True,
            mlp_bias=False,
        )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self._soft_cap: float | None = config.raw["final_logit_softcapping"]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if self._soft_cap is None else (logits / self._soft_cap).tanh() * self._soft_cap
