"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP instead of before, and norms of all query and all key heads.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
All but the norms is Llama's.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.layers import Layer, RMSNorm, ShardedRMSNorm
from minisgl_models.config_keys import unsupported_keys, with_defaults
from minisgl_models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaModel


class Olmo2Attention(LlamaAttention):
    """`LlamaAttention` with one RMSNorm over all heads of q and one over all heads of k."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        super().__init__(config, index, build, reduce=True)  # post_attention_layernorm needs the whole output
        self.q_norm = ShardedRMSNorm(self.qkv_proj.q_rows, config.rms_norm_eps, build)
        self.k_norm = ShardedRMSNorm(self.qkv_proj.kv_rows, config.rms_norm_eps, build)

    def qkv(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of each head, after the norms."""
        q, k, v = super().qkv(hidden_states)
        q, k = (norm.forward(x.flatten(1)).view(x.shape) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return q, k, v


class Olmo2DecoderLayer(Layer):
    """Attention and MLP with residual connections; their outputs are normalized, not their inputs."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        self.self_attn = Olmo2Attention(config, index, build)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.mlp = LlamaMLP(config, build, reduce=True)  # post_feedforward_layernorm needs the whole output
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the residual stream, [T, H] or [N, H]. There is no separate residual."""
        attn_output = self.self_attn.forward(hidden_states, cos, sin, attend, logits_index)
        if logits_index is not None:
            hidden_states = hidden_states.index_select(0, logits_index)
        hidden_states = hidden_states + self.post_attention_layernorm.forward(attn_output)
        return hidden_states + self.post_feedforward_layernorm.forward(self.mlp.forward(hidden_states)), None


class Olmo2ForCausalLM(LlamaForCausalLM):
    """OLMo 2 with its LM head."""

    decoder: ClassVar = partial(LlamaModel, layer=Olmo2DecoderLayer)
    num_intermediate: ClassVar = 1

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the defaults of transformers' config class that are not Llama's."""
        return with_defaults({"rms_norm_eps": 1e-5}, raw)

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default, and biases of the MLP, sliding windows and a soft cap."""
        return unsupported_keys(config, mlp_bias=False, sliding_window=None, attn_logit_softcapping=None)
