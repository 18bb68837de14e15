"""OLMo 3 (AI2): OLMo 2 with windows in three of four layers; only layers without a window have RoPE scaling."""

from collections.abc import Mapping
from typing import Any

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError
from minisgl_models.config_keys import layer_types, rope_parameters_by_layer_type, unsupported_keys, with_defaults
from minisgl_models.olmo2 import Olmo2ForCausalLM

_THETA = 500000.0


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3 with its LM head."""

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
        config = with_defaults({"num_hidden_layers": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}, raw)
        return {
            **config,
            "layer_types": layer_types(config, lambda index: index % 4 != 3),
            "rope_parameters": rope_parameters_by_layer_type(raw, _THETA, _THETA),
            "rope_scaling": None,
        }

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default, and biases of the MLP, a soft cap and disabled windows."""
        return unsupported_keys(config, mlp_bias=False, use_sliding_window=True, attn_logit_softcapping=None)
