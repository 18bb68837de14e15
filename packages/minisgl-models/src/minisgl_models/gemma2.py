"""Gemma 2 (arXiv 2408.00118): windows in every other layer, soft caps, and a norm before and after attention and MLP.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
Projections, rotary embedding and the loop over the layers are Llama's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from minisgl_core.config.keys import Keys
from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.layers import Attention, Layer, MergedColumnParallelLinear, RMSNorm, RowParallelLinear
from minisgl_models.config_keys import layer_types, unsupported_keys, with_defaults
from minisgl_models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel

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


class Gemma2Attention(LlamaAttention):
    """`LlamaAttention` whose scores are scaled by `query_pre_attn_scalar`, and may be soft-capped."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build, reduce=True)  # post_attention_layernorm needs the whole output
        scale, window = config.raw["query_pre_attn_scalar"] ** -0.5, config.sliding_windows[index]
        self.attn = Attention(index, scale, window, build, soft_cap=config.soft_cap)


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
    """Attention and MLP with residual connections, and a norm before and after each."""

    def __init__(
        self, config: ModelConfig, index: int, build: BuildContext, attention: type[Any] = Gemma2Attention
    ) -> None:
        self.input_layernorm = gemma_norm(config.hidden_size, config, build)
        self.self_attn = attention(config, index, build)
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


class Gemma2Model(LlamaModel):
    """`LlamaModel` with a scaled embedding, and a final norm that multiplies by ``1 + weight``."""

    def __init__(self, config: ModelConfig, build: BuildContext, **parts: type[Any]) -> None:
        super().__init__(config, build, Gemma2DecoderLayer, **parts)
        if self._stage.has_lm_head:
            self.norm = gemma_norm(config.hidden_size, config, build)
        # transformers rounds the factor to the model's dtype, and the model was trained with the rounded one.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=build.dtype))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self._embedding_scale


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2 with its LM head."""

    decoder: ClassVar[Any] = Gemma2Model

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class; every other layer has a window."""
        config = with_defaults(_DEFAULTS, raw)
        kinds = layer_types(config, lambda index: index % 2 == 0)
        activation = config["hidden_activation"] or _DEFAULTS["hidden_activation"]
        return {**config, "layer_types": kinds, "hidden_act": activation}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, partial RoPE, bidirectional attention, other activations, MLP biases and disabled windows."""
        return unsupported_keys(
            config,
            hidden_activation=_DEFAULTS["hidden_activation"],
            use_bidirectional_attention=False,
            use_sliding_window=True,
            mlp_bias=False,
        )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self._soft_cap = Keys(config.raw).positive_or_none("final_logit_softcapping")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if self._soft_cap is None else (logits / self._soft_cap).tanh() * self._soft_cap
