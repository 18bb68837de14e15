"""gpt-oss (arXiv 2508.10925): attention sinks, a window in every second layer, and biased experts with a clamp.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
Attention is Llama's with a sink per query head.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig, MoeConfig
from minisgl_core.contracts.moe import RoutingSpec
from minisgl_core.layers import Attention, CausalLM, FusedMoE, Layer, ReplicatedLinear
from minisgl_models.config_keys import layer_types, unsupported_keys, with_defaults
from minisgl_models.llama import LlamaAttention, LlamaModel

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE scaling of a config that has none."""


class GptOssAttention(LlamaAttention):
    """Grouped-query attention with sinks: the softmax has one learned logit more per query head, without a value."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build)
        # It replaces LlamaAttention's, which has no sinks.
        window, num_sinks = config.sliding_windows[index], config.num_q_heads
        self.attn = Attention(index, config.head_dim**-0.5, window, build, num_sinks=num_sinks)


class GptOssMLP(Layer):
    """Router and `top_k` routed experts per token, weighted by the softmax of their logits."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, build: BuildContext) -> None:
        self.router = ReplicatedLinear(config.hidden_size, moe.num_experts, build, bias=True)
        # Its all-reduce is fused into the next layer's input_layernorm, or the final norm.
        self.experts = FusedMoE(
            moe.num_experts,
            config.hidden_size,
            moe.intermediate_size,
            RoutingSpec(moe.top_k, renormalize=moe.norm_topk_prob),
            build,
            activation=moe.activation,
            bias=moe.has_bias,
            swiglu_limit=config.raw["swiglu_limit"],
            reduce=False,
            is_stacked=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.experts.forward(x, self.router.forward(x))


class GptOssForCausalLM(CausalLM):
    """gpt-oss with its LM head."""

    decoder: ClassVar = partial(LlamaModel, attention=GptOssAttention, experts=GptOssMLP)
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class: windows in the even layers, and YaRN."""
        keys = with_defaults(_DEFAULTS, raw)
        keys |= {"attention_sinks": True, "expert_activation": "swigluoai", "expert_bias": True}
        keys["expert_swiglu_limit"] = keys["swiglu_limit"]
        if not (keys.get("rope_parameters") or keys.get("rope_scaling")):
            keys["rope_scaling"] = _ROPE
        return {**keys, "layer_types": layer_types(keys, lambda index: index % 2 == 0)}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse configs without experts, partial RoPE, MLP biases, a soft cap, disabled windows, and experts of other kinds."""
        return unsupported_keys(
            config,
            experts=True,
            attention_sinks=True,
            attn_logit_softcapping=None,
            decoder_sparse_step=1,
            mlp_bias=False,
            mlp_only_layers=[],
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
            swiglu_alpha=_DEFAULTS["swiglu_alpha"],
            use_sliding_window=True,
        )
