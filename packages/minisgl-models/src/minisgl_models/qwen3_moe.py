"""Qwen3 with experts (arXiv 2505.09388): Qwen3 whose sparse layers have routed experts instead of an MLP.

All but the experts is Qwen3's.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_models.config_keys import unsupported_keys
from minisgl_models.llama import LlamaForCausalLM, LlamaModel
from minisgl_models.mixtral import MixtralSparseMoeBlock
from minisgl_models.qwen3 import Qwen3Attention

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


class Qwen3MoeSparseMoeBlock(MixtralSparseMoeBlock):
    """`MixtralSparseMoeBlock` with other names in the checkpoint."""

    names: ClassVar = ("gate_proj", "up_proj", "down_proj")


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3-MoE with its LM head."""

    decoder: ClassVar = partial(LlamaModel, attention=Qwen3Attention, experts=Qwen3MoeSparseMoeBlock)

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse configs without experts, partial RoPE, biases of the MLP, and experts that are not Qwen3's."""
        return unsupported_keys(config, experts=True, mlp_bias=False, **_OTHER_EXPERT_KEYS)
