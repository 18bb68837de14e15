"""OLMo 3 (AI2): OLMo 2 with windows in three of four layers; only layers without a window have RoPE scaling.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError
from minisgl_core.layers import CausalLM, Layer, RMSNorm, RotaryEmbedding, VocabParallelEmbedding
from minisgl_models.config_keys import rope_parameters_by_layer_type, unsupported_keys, whole_number, with_defaults
from minisgl_models.olmo2 import Olmo2DecoderLayer

_THETA = 500000.0


class Olmo3Model(Layer):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        assert config.sliding_rope is not None, "standard_config sets both"
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.rotary_emb_local = RotaryEmbedding(config.sliding_rope, config.max_position, build)
        self._windows = config.sliding_windows
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
        full, local = self.rotary_emb.forward(positions), self.rotary_emb_local.forward(positions)
        hidden_states = self.embed_tokens.forward(input_ids) if intermediate is None else intermediate[0]
        last = max(self.layers)
        for index, layer in self.layers.items():
            cos, sin = full if self._windows[index] is None else local
            # After the last attention, only the tokens whose logits are computed are needed.
            wanted = logits_index if index == last else None
            hidden_states = layer.forward(hidden_states, cos, sin, attend, wanted)
        return self.norm.forward(hidden_states) if self._stage.has_lm_head else hidden_states[None]


class Olmo3ForCausalLM(CausalLM):
    """OLMo 3 with its LM head."""

    decoder: ClassVar = Olmo3Model
    num_intermediate: ClassVar = 1
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class, and the RoPE parameters of each layer type.

        Raises:
            ModelFormatError: transformers 4 and 5 would apply the config's ``rope_theta`` to different layers.
        """
        if raw.get("rope_theta", _THETA) not in (None, _THETA):
            raise ModelFormatError(
                f"config: rope_theta={raw['rope_theta']!r} applies to different layers in transformers 4 and 5; set it in "
                "rope_parameters, for full_attention and for sliding_attention"
            )
        config = with_defaults({"rms_norm_eps": 1e-5, "sliding_window": 4096}, raw)
        kinds = [
            "full_attention" if i % 4 == 3 else "sliding_attention"
            for i in range(whole_number({"num_hidden_layers": 32, **raw}, "num_hidden_layers", 1))
        ]
        return {
            **config,
            "layer_types": config.get("layer_types") or kinds,
            "rope_parameters": rope_parameters_by_layer_type(raw, _THETA, _THETA),
            "rope_scaling": None,
        }

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, biases of the MLP and a soft cap."""
        return unsupported_keys(config, mlp_bias=False, use_sliding_window=True, attn_logit_softcapping=None)
