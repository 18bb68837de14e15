"""Mixtral (arXiv 2401.04088): Mistral with routed experts in place of every MLP.

Shape legend: T tokens of the step, H hidden size.
Attention is Llama's, with the sliding window of the config in every layer.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig, MoeConfig
from minisgl_core.contracts.moe import RoutingSpec
from minisgl_core.layers import CausalLM, FusedMoE, Layer, ReplicatedLinear, check_activation
from minisgl_models.config_keys import unsupported_keys, with_defaults
from minisgl_models.llama import LlamaDecoderLayer, LlamaModel

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


class MixtralSparseMoeBlock(Layer):
    """Router and `top_k` routed experts per token, weighted by the softmax of their logits.

    Attributes:
        names: the checkpoint's names for an expert's gate, up and down projection.
    """

    names: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")

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
            names=self.names,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.experts.forward(x, self.gate.forward(x))


class MixtralDecoderLayer(LlamaDecoderLayer):
    """`LlamaDecoderLayer` with another name of the MLP in the checkpoint."""

    def sublayers(self) -> Iterator[tuple[str, Layer]]:
        """Yield each sub-layer under its name in the checkpoint."""
        return (("block_sparse_moe" if name == "mlp" else name, layer) for name, layer in super().sublayers())


class MixtralForCausalLM(CausalLM):
    """Mixtral with its LM head."""

    decoder: ClassVar = partial(LlamaModel, layer=MixtralDecoderLayer, experts=MixtralSparseMoeBlock)
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_defaults(_DEFAULTS, raw)

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse configs without experts, partial RoPE, biases, a soft cap, layer types, disabled windows, and other experts."""
        return unsupported_keys(
            config,
            experts=True,
            attention_bias=False,
            attn_logit_softcapping=None,
            decoder_sparse_step=1,
            layer_types=None,
            mlp_bias=False,
            mlp_only_layers=[],
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
            use_sliding_window=True,
        )
