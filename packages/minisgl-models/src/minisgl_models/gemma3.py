"""Gemma 3 (arXiv 2503.19786): a norm before and after attention and MLP, and windows in five of six layers.

Layers with a window have a rotary embedding of their own. The text model of multimodal checkpoints runs; the rest is left out.

The layers are Gemma 2's with QK norms.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from minisgl_core.config.keys import Keys
from minisgl_core.contracts.layer import FusedProjections, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_models.config_keys import (
    layer_types,
    rope_parameters_by_layer_type,
    unsupported_keys,
    whole_number,
    with_defaults,
)
from minisgl_models.gemma2 import Gemma2Attention, Gemma2ForCausalLM, Gemma2Model, gemma_norm

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


class Gemma3Attention(Gemma2Attention):
    """`Gemma2Attention` with QK norms."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build)
        self.q_norm = gemma_norm(config.head_dim, config, build)
        self.k_norm = gemma_norm(config.head_dim, config, build)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        return Rope(cos, sin, (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 with its LM head."""

    decoder: ClassVar = partial(Gemma2Model, attention=Gemma3Attention)

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class, and the RoPE parameters of each layer type."""
        config = with_defaults(_DEFAULTS, raw)
        every = whole_number(config, "sliding_window_pattern", 1)
        thetas = config.get("rope_theta") or 1e6, config.get("rope_local_base_freq") or 1e4
        return {
            **config,
            "layer_types": layer_types(config, lambda index: (index + 1) % every != 0),
            "hidden_act": config["hidden_activation"] or _DEFAULTS["hidden_activation"],
            "rope_parameters": rope_parameters_by_layer_type(raw, *thetas),
            "rope_scaling": None,
        }

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, partial RoPE, bidirectional attention, other activations, MLP biases, caps and disabled windows."""
        return unsupported_keys(
            config,
            hidden_activation=_DEFAULTS["hidden_activation"],
            use_bidirectional_attention=False,
            use_sliding_window=True,
            attn_logit_softcapping=None,
            mlp_bias=False,
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Text model of a multimodal checkpoint. Images are not supported."""

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the text model's config, with the keys beside it that the engine reads."""
        shared = {key: raw[key] for key in _SHARED if key in raw}
        return super().standard_config({**Keys(raw).mapping("text_config"), "tie_word_embeddings": True, **shared})

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `Gemma3ForCausalLM` does, and a soft cap of the logits, which this class of transformers ignores."""
        reasons = unsupported_keys(config, final_logit_softcapping=None)
        return list(dict.fromkeys((*super().unsupported(config), *reasons)))

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield the text model's tensors under their names in Google's checkpoints."""
        return super().weight_targets("language_model", fused_projections)

    def tensor_name(self, stored: str) -> str | None:
        """Return the name in Google's checkpoints of a tensor that is named by transformers' modules."""
        for prefix, own in _MODULES.items():
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix)
        return stored

    def ignored_weights(self) -> tuple[str, ...]:
        """Return the patterns of the vision model, too."""
        tied = ("language_model.lm_head.weight",) if self.config.tie_embeddings else ()
        return *super().ignored_weights(), *tied, "vision_tower.*", "multi_modal_projector.*"

    def weights_of_other_stages(self) -> tuple[str, ...]:
        """Return the text model's patterns, with the prefix that its tensors have in this checkpoint."""
        return tuple(f"language_model.{name}" for name in super().weights_of_other_stages())
