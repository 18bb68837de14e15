"""Qwen2 with experts (Qwen1.5-MoE, Qwen2-57B-A14B; arXiv 2407.10671): Qwen2 with routed experts and a shared expert.

Shape legend: T tokens of the step, H hidden size.
All but the experts is Llama's, with q, k and v biases.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from minisgl_core.config.keys import Keys
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig, MoeConfig
from minisgl_core.layers import ReplicatedLinear
from minisgl_models.config_keys import layer_types, unsupported_keys, whole_number, with_defaults
from minisgl_models.llama import LlamaForCausalLM, LlamaMLP, LlamaModel
from minisgl_models.mixtral import MixtralSparseMoeBlock

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "qkv_bias": True,
}


class Qwen2MoeSparseMoeBlock(MixtralSparseMoeBlock):
    """Router, `top_k` routed experts per token, and a shared expert weighted by a gate (arXiv 2401.06066)."""

    names: ClassVar = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: ModelConfig, moe: MoeConfig, build: BuildContext) -> None:
        super().__init__(config, moe, build)
        # The all-reduce of both is fused into the next layer's input_layernorm, or the final norm.
        shared = replace(config, intermediate_size=Keys(config.raw).positive_whole("shared_expert_intermediate_size"))
        self.shared_expert = LlamaMLP(shared, build)
        self.shared_expert_gate = ReplicatedLinear(config.hidden_size, 1, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        shared = self.shared_expert.forward(x) * self.shared_expert_gate.forward(x).sigmoid()
        return self.experts.forward(x, self.gate.forward(x), shared)


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """Qwen2 MoE with its LM head."""

    decoder: ClassVar = partial(LlamaModel, experts=Qwen2MoeSparseMoeBlock)

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class, and the windows of its layers."""
        keys = with_defaults(_DEFAULTS, raw)
        if keys["use_sliding_window"]:
            # Unlike in Qwen2, windows are in the even layers below max_window_layers, as in transformers.
            with_window = range(0, whole_number(keys, "max_window_layers"), 2)
            keys["layer_types"] = layer_types(keys, lambda index: index in with_window)
        return {**keys, "attention_bias": keys["qkv_bias"], "o_bias": False}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse configs without experts, partial RoPE, biases of the MLP, and a soft cap."""
        return unsupported_keys(config, experts=True, attn_logit_softcapping=None, mlp_bias=False)
