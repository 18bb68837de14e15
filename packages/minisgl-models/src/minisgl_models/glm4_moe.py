"""GLM-4.5 and later GLM with experts (arXiv 2508.06471): sigmoid routing with a correction bias, and shared experts.

Shape legend: T tokens of the step, H hidden size, E experts.
The decoder layer and the dense MLP are Llama's.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig, MoeConfig
from minisgl_core.contracts.moe import RoutingSpec
from minisgl_core.contracts.ops import Rope
from minisgl_core.errors import ModelFormatError
from minisgl_core.layers import FusedMoE, Layer, RMSNorm, check_activation
from minisgl_models.config_keys import unsupported_keys, whole_number, with_defaults
from minisgl_models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaModel

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
}


class Glm4MoeAttention(LlamaAttention):
    """`LlamaAttention` with partial RoPE, after QK norms if the config has them."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build)
        self._eps, self._norms = config.rms_norm_eps, None
        if config.raw["use_qk_norm"]:
            self.q_norm = RMSNorm(config.head_dim, self._eps, build)
            self.k_norm = RMSNorm(config.head_dim, self._eps, build)
            self._norms = self.q_norm.weight, self.k_norm.weight

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        return Rope(cos, sin, self._norms, self._eps)


class Glm4MoeTopkRouter(Layer):
    """Router in float32, whatever the model's dtype, since rounding could change the order of close scores."""

    def __init__(self, hidden_size: int, num_experts: int, build: BuildContext) -> None:
        shapes = (num_experts, hidden_size), (num_experts,)
        weight, bias = (torch.empty(shape, dtype=torch.float32, device=build.device) for shape in shapes)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to logits, float32 [T, E]."""
        return nn.functional.linear(x.float(), self.weight)


class Glm4MoeMoE(Layer):
    """Routed experts and shared experts, which are one MLP (arXiv 2412.19437)."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, build: BuildContext) -> None:
        check_activation(config)
        raw = config.raw
        self.gate = Glm4MoeTopkRouter(config.hidden_size, moe.num_experts, build)
        routing = RoutingSpec(
            moe.top_k,
            renormalize=moe.norm_topk_prob,
            scoring="sigmoid",
            num_groups=whole_number(raw, "n_group", 1),
            topk_groups=whole_number(raw, "topk_group", 1),
            scaling_factor=raw["routed_scaling_factor"],
        )
        try:
            # The all-reduce of both is fused into the next layer's input_layernorm, or the final norm.
            self.experts = FusedMoE(
                moe.num_experts,
                config.hidden_size,
                moe.intermediate_size,
                routing,
                build,
                correction_bias=self.gate.e_score_correction_bias,
                reduce=False,
            )
        except ModelFormatError as error:  # of the routing
            keys = "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"
            raise ModelFormatError(f"config: {', '.join(f'{key}={raw.get(key)}' for key in keys)}: {error}") from None
        shared = replace(config, intermediate_size=moe.intermediate_size * whole_number(raw, "n_shared_experts", 1))
        self.shared_experts = LlamaMLP(shared, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.experts.forward(x, self.gate.forward(x), self.shared_experts.forward(x))


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4-MoE with its LM head."""

    decoder: ClassVar = partial(LlamaModel, attention=Glm4MoeAttention, experts=Glm4MoeMoE)

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class; the first layers have no experts."""
        keys = with_defaults(_DEFAULTS, raw)
        first = list(range(whole_number(keys, "first_k_dense_replace")))
        return {**keys, "num_experts": keys["n_routed_experts"], "mlp_only_layers": first, "o_bias": False}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse configs without experts, MLP biases, sliding windows, a soft cap, and other routing or sparse layers."""
        return unsupported_keys(
            config,
            partial_rotary=True,
            experts=True,
            attn_logit_softcapping=None,
            decoder_sparse_step=1,
            mlp_bias=False,
            scoring_func="sigmoid",
            sliding_window=None,
        )

    def ignored_weights(self) -> tuple[str, ...]:
        """Return patterns of tensors without a use here, among them the layers for multi-token prediction."""
        first, count = self.config.num_layers, whole_number(self.config.raw, "num_nextn_predict_layers")
        return *super().ignored_weights(), *(f"model.layers.{index}.*" for index in range(first, first + count))
