"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with fused projections in the checkpoint, and LongRoPE."""

from collections.abc import Mapping
from typing import Any, ClassVar

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_models.config_keys import unsupported_keys, with_defaults
from minisgl_models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` whose checkpoints have fused projections."""

    fused_projections: ClassVar = {}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add defaults, and LongRoPE's name and original context.

        Older checkpoints call it ``su`` or ``yarn``, and have its original context at the top level.
        """
        config = with_defaults({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}, raw)
        for name in ("rope_scaling", "rope_parameters"):
            rope = config.get(name)
            if not isinstance(rope, Mapping):
                continue
            if rope.get("rope_type", rope.get("type")) in ("su", "yarn", "longrope"):
                original = config["original_max_position_embeddings"]
                config[name] = {**rope, "rope_type": "longrope", "original_max_position_embeddings": original}
        return config

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, biases, a soft cap, windows in some layers, disabled windows, and RoPE scaling other than LongRoPE."""
        reasons = unsupported_keys(
            config,
            partial_rotary=True,
            attention_bias=False,
            mlp_bias=False,
            use_sliding_window=True,
            layer_types=None,
            attn_logit_softcapping=None,
        )
        if config.rope.kind not in ("default", "longrope"):
            reasons.append(
                f"{cls.__name__} has no rotary embedding of the kind {config.rope.kind}"
                " (rope_type in the config: default or longrope)"
            )
        return reasons
