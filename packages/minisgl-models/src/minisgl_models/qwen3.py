"""Qwen3, dense (arXiv 2505.09388): Llama with RMSNorm of each query and key head (QK norm).

All but the attention is Llama's.
"""

from functools import partial
from typing import ClassVar

import torch

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_core.layers import RMSNorm
from minisgl_models.config_keys import unsupported_keys
from minisgl_models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel


class Qwen3Attention(LlamaAttention):
    """`LlamaAttention` with QK norms."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, build)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, build)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        return Rope(cos, sin, (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with its LM head."""

    decoder: ClassVar = partial(LlamaModel, attention=Qwen3Attention)

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default, and biases of the MLP."""
        return unsupported_keys(config, mlp_bias=False)
