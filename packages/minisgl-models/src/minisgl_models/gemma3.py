"""Gemma 3 (arXiv 2503.19786): a norm before and after attention and MLP, and windows in five of six layers.

Layers with a window have a rotary embedding of their own. The text model of multimodal checkpoints runs; the rest is left out.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
The MLP and the decoder layer are Gemma 2's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from minisgl_core.config.keys import Keys
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_core.layers import (
    Attention,
    CausalLM,
    Layer,
    QKVParallelLinear,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minisgl_models.config_keys import (
    rope_parameters_by_layer_type,
    unsupported_keys,
    whole_number,
    with_defaults,
)
from minisgl_models.gemma2 import Gemma2DecoderLayer, gemma_norm

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_SHARED = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
"""Keys that multimodal checkpoints have beside the text model's config."""
_MODULES: Mapping[str, str] = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
"""Prefixes of tensor names: those of transformers' modules, which some checkpoints have, and those of Google's checkpoints."""


class Gemma3Attention(Layer):
    """Grouped-query attention with QK norms and rotary embedding."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """Build the layers. `index` is the index of the decoder layer."""
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(hidden, dim, num_q, num_kv, build, bias=config.qkv_bias)
        # It all-reduces, since post_attention_layernorm needs the whole output.
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build, bias=config.o_bias)
        self.q_norm, self.k_norm = gemma_norm(dim, config, build), gemma_norm(dim, config, build)
        scale = config.raw["query_pre_attn_scalar"] ** -0.5
        self.attn = Attention(index, scale, config.sliding_windows[index], build)

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


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    """`Gemma2DecoderLayer` with QK norms.

    Attributes:
        is_sliding: the attention has a sliding window.
    """

    attention: ClassVar = Gemma3Attention

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build)
        self.is_sliding = config.sliding_windows[index] is not None


class Gemma3Model(Layer):
    """Scaled embedding, decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        assert config.sliding_rope is not None, "standard_config sets both"
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.rotary_emb_local = RotaryEmbedding(config.sliding_rope, config.max_position, build)
        self.layers = {index: Gemma3DecoderLayer(config, index, build) for index in stage.layers}
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
        full, local = self.rotary_emb.forward(positions), self.rotary_emb_local.forward(positions)
        if intermediate is None:
            hidden_states, residual = self.embed_tokens.forward(input_ids) * self._embedding_scale, None
        else:
            hidden_states, residual = intermediate.unbind(0)
        *layers, last = self.layers.values()
        for layer in layers:
            cos, sin = local if layer.is_sliding else full
            hidden_states, residual = layer.forward(hidden_states, residual, cos, sin, attend)
        # After the last attention, only the tokens whose logits are computed are needed.
        cos, sin = local if last.is_sliding else full
        hidden_states, residual = last.forward(hidden_states, residual, cos, sin, attend, logits_index)
        if not self._stage.has_lm_head:
            return torch.stack((hidden_states, residual))
        return self.norm.add(hidden_states, residual)[0]


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 with its LM head."""

    decoder: ClassVar = Gemma3Model
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class, and the RoPE parameters of each layer type."""
        config = with_defaults(_DEFAULTS, raw)
        every = whole_number(config, "sliding_window_pattern", 1)
        indices = range(1, whole_number(config, "num_hidden_layers", 1) + 1)
        kinds = ["sliding_attention" if i % every else "full_attention" for i in indices]
        thetas = config.get("rope_theta") or 1e6, config.get("rope_local_base_freq") or 1e4
        return {
            **config,
            "layer_types": config.get("layer_types") or kinds,
            "hidden_act": config["hidden_activation"] or _DEFAULTS["hidden_activation"],
            "rope_parameters": rope_parameters_by_layer_type(raw, *thetas),
            "rope_scaling": None,
        }

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse other activations, bidirectional attention, a soft cap of scores, biases of the MLP, and experts."""
        return unsupported_keys(
            config,
            hidden_activation=_DEFAULTS["hidden_activation"],
            use_bidirectional_attention=False,
            use_sliding_window=True,
            attn_logit_softcapping=None,
            mlp_bias=False,
        )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self._soft_cap: float | None = Keys(config.raw).optional("final_logit_softcapping")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if self._soft_cap is None else (logits / self._soft_cap).tanh() * self._soft_cap


class Gemma3ForConditionalGeneration(Model):
    """Text model of a multimodal checkpoint. Images are not supported."""

    fused_projections: ClassVar = Gemma3ForCausalLM.fused_projections

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the text model's config, with the keys beside it that the engine reads."""
        shared = {key: raw[key] for key in _SHARED if key in raw}
        return Gemma3ForCausalLM.standard_config(
            {**Keys(raw).mapping("text_config"), "tie_word_embeddings": True, **shared}
        )

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `Gemma3ForCausalLM` does, and a soft cap of the logits, which this class of transformers ignores."""
        reasons = unsupported_keys(config, final_logit_softcapping=None)
        return list(dict.fromkeys((*Gemma3ForCausalLM.unsupported(config), *reasons)))

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.language_model = Gemma3ForCausalLM(config, build)
        self.vocab_shard = self.language_model.vocab_shard

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.language_model.forward(input_ids, positions, attend, logits_index, intermediate)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.language_model.compute_logits(hidden_states)

    def attention_layers(self) -> list[AttentionLayer]:
        return self.language_model.attention_layers()

    def tensor_name(self, stored: str) -> str | None:
        """Return the name in Google's checkpoints of a tensor that is named by transformers' modules."""
        for prefix, own in _MODULES.items():
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix)
        return stored

    def ignored_weights(self) -> tuple[str, ...]:
        """Return the patterns of the vision model, too."""
        own = (f"language_model.{name}" for name in ("lm_head.weight",) if self.config.tie_embeddings)
        return *super().ignored_weights(), *own, "vision_tower.*", "multi_modal_projector.*"

    def weights_of_other_stages(self) -> tuple[str, ...]:
        """Return the text model's patterns, with the prefix that its tensors have in this checkpoint."""
        return tuple(f"language_model.{name}" for name in super().weights_of_other_stages())
