"""Qwen3 with experts (arXiv 2505.09388): Qwen3 whose sparse layers have routed experts instead of an MLP.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
All but the experts is Qwen3's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig, MoeConfig
from minisgl_core.contracts.moe import RoutingSpec
from minisgl_core.layers import FusedMoE, Layer, ReplicatedLinear, check_activation
from minisgl_models.config_keys import unsupported_keys
from minisgl_models.llama import LlamaForCausalLM, LlamaMLP, LlamaModel
from minisgl_models.qwen3 import Qwen3DecoderLayer

_OTHER_EXPERT_KEYS: Mapping[str, Any] = {
    "n_group": 1,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1,
    "scoring_func": "softmax",
    "shared_expert_intermediate_size": 0,
    "swiglu_limit": 0,
    "topk_group": 1,
}
"""Keys of other architectures' experts, and their values without effect."""


class Qwen3MoeSparseMoeBlock(Layer):
    """Router and `top_k` routed experts per token (arXiv 2101.03961)."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, build: BuildContext) -> None:
        check_activation(config)
        self.gate = ReplicatedLinear(config.hidden_size, moe.num_experts, build)
        # Its all-reduce is fused into the next layer's input_layernorm, or the final norm.
        self.experts = FusedMoE(
            moe.num_experts,
            config.hidden_size,
            moe.intermediate_size,
            RoutingSpec(moe.top_k, renormalize=moe.norm_topk_prob),
            build,
            reduce=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.experts.forward(x, self.gate.forward(x))


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    """`Qwen3DecoderLayer` with experts in the sparse layers."""

    def build_mlp(self, config: ModelConfig, index: int, build: BuildContext) -> LlamaMLP | Qwen3MoeSparseMoeBlock:
        """Return the experts, or the MLP of a dense layer."""
        moe = config.moe
        if moe is None or index in moe.dense_layers:
            return LlamaMLP(config, build)
        return Qwen3MoeSparseMoeBlock(config, moe, build)


class Qwen3MoeModel(LlamaModel):
    """`LlamaModel` with experts."""

    decoder_layer: ClassVar = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3-MoE with its LM head."""

    decoder: ClassVar = Qwen3MoeModel

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse configs without experts, or with experts that are not Qwen3's."""
        return unsupported_keys(config, experts=True, mlp_bias=False, **_OTHER_EXPERT_KEYS)
