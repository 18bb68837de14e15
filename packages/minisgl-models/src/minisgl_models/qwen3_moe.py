"""Qwen3 with experts (arXiv 2505.09388): Qwen3 whose sparse layers have routed experts instead of an MLP.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
Attention and the dense MLP are Qwen3's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig, MoeConfig
from minisgl_core.contracts.moe import RoutingSpec
from minisgl_core.layers import (
    CausalLM,
    FusedMoE,
    Layer,
    ReplicatedLinear,
    RMSNorm,
    check_activation,
)
from minisgl_models.config_keys import unsupported_keys
from minisgl_models.llama import LlamaModel
from minisgl_models.qwen3 import Qwen3Attention, Qwen3MLP

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


class Qwen3MoeDecoderLayer(Layer):
    """Pre-norm attention and MLP, or experts, with residual connections."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        self.self_attn = Qwen3Attention(config, index, build)
        self.post_attention_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        moe = config.moe
        self.mlp: Qwen3MLP | Qwen3MoeSparseMoeBlock
        if moe is None or index in moe.dense_layers:
            self.mlp = Qwen3MLP(config, build)
        else:
            self.mlp = Qwen3MoeSparseMoeBlock(config, moe, build)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output, which the next norm adds to the residual, and the residual."""
        hidden_states, residual = self.input_layernorm.add(hidden_states, residual)
        hidden_states = self.self_attn.forward(hidden_states, cos, sin, attend, logits_index)
        if logits_index is not None:
            residual = residual.index_select(0, logits_index)
        hidden_states, residual = self.post_attention_layernorm.add(hidden_states, residual)
        return self.mlp.forward(hidden_states), residual


class Qwen3MoeModel(LlamaModel):
    """`LlamaModel` with experts."""

    decoder_layer: ClassVar = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3-MoE with its LM head."""

    decoder: ClassVar = Qwen3MoeModel
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse configs without experts, or with experts that are not Qwen3's."""
        return unsupported_keys(config, experts=True, mlp_bias=False, **_OTHER_EXPERT_KEYS)
