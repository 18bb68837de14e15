"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with fused projections in the checkpoint, and LongRoPE.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
`docs/plugins/model.md` walks through granite.py, a file like this one.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_core.layers import (
    Attention,
    CausalLM,
    Layer,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_activation,
)
from minisgl_models.config_keys import unsupported_keys, with_defaults


class Phi3Attention(Layer):
    """Grouped-query attention with a rotary embedding of all or of the first dimensions of a head."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        """Build the layers. `index` is the index of the decoder layer."""
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(hidden, dim, num_q, num_kv, build)
        # Its all-reduce is fused into post_attention_layernorm.
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build, reduce=False)
        self.attn = Attention(index, dim**-0.5, config.sliding_windows[index], build)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map [T, H] to [T, H], or to [N, H] for the tokens at `logits_index`."""
        q, k, v = self.qkv_proj.heads(hidden_states)
        # If the backend supports it, RoPE and KV store are one kernel, or part of the attention kernel.
        attn_output = self.attn.forward(q, k, v, attend, Rope(cos, sin))
        if logits_index is not None:
            attn_output = attn_output.index_select(0, logits_index)
        return self.o_proj.forward(attn_output.flatten(1))


class Phi3MLP(Layer):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        check_activation(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        # One GEMM. Some kernels apply the activation in its epilogue.
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build, silu_and_mul=True)
        # Its all-reduce is fused into the next layer's input_layernorm, or the final norm.
        self.down_proj = RowParallelLinear(inner, hidden, build, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.down_proj.forward(self.gate_up_proj.forward(x))


class Phi3DecoderLayer(Layer):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        self.self_attn = Phi3Attention(config, index, build)
        self.post_attention_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        self.mlp = Phi3MLP(config, build)

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


class Phi3Model(Layer):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self._stage = stage = build.stage(config)
        if stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        self.layers = {index: Phi3DecoderLayer(config, index, build) for index in stage.layers}
        if stage.has_lm_head:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build, all_reduce=True)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None,
        intermediate: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return hidden states, [T, H], or [N, H] for the tokens at `logits_index`.

        Between pipeline stages, `intermediate` and the result are hidden states and residual, [2, T, H].
        """
        cos, sin = self.rotary_emb.forward(positions)
        if intermediate is None:
            hidden_states, residual = self.embed_tokens.forward(input_ids), None
        else:
            hidden_states, residual = intermediate.unbind(0)
        *layers, last = self.layers.values()
        for layer in layers:
            hidden_states, residual = layer.forward(hidden_states, residual, cos, sin, attend)
        # After the last attention, only the tokens whose logits are computed are needed.
        hidden_states, residual = last.forward(hidden_states, residual, cos, sin, attend, logits_index)
        if not self._stage.has_lm_head:
            return torch.stack((hidden_states, residual))
        return self.norm.add(hidden_states, residual)[0]


class Phi3ForCausalLM(CausalLM):
    """Phi-3 with its LM head."""

    decoder: ClassVar = Phi3Model

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add defaults, and LongRoPE's name and original context.

        Older checkpoints call it ``su`` or ``yarn``, and have its original context at the top level.
        """
        config = with_defaults({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}, raw)
        for name in ("rope_scaling", "rope_parameters"):
            rope = config.get(name)
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) in (
                "su",
                "yarn",
                "longrope",
            ):
                original = config["original_max_position_embeddings"]
                config[name] = {**rope, "rope_type": "longrope", "original_max_position_embeddings": original}
        return config

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse experts, biases, a soft cap and windows in some layers, and other context scaling than LongRoPE."""
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
