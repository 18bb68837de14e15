"""Llama 1 to 3 (arXiv 2302.13971, 2407.21783), and models with the same architecture, such as SmolLM2.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
`docs/plugins/model.md` walks through granite.py, a file like this one.
"""

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
from minisgl_models.config_keys import unsupported_keys


class LlamaAttention(Layer):
    """Grouped-query attention with rotary embedding."""

    def __init__(self, config: ModelConfig, index: int, build: BuildContext, *, reduce: bool = False) -> None:
        """Build the layers. `index` is the index of the decoder layer.

        Without `reduce`, the all-reduce of the output is fused into post_attention_layernorm.
        """
        hidden, dim, num_q, num_kv = config.hidden_size, config.head_dim, config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(hidden, dim, num_q, num_kv, build, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear(num_q * dim, hidden, build, bias=config.o_bias, reduce=reduce)
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
        q, k, v = self.qkv(hidden_states)
        # If the backend supports it, QK norms, RoPE and KV store are one kernel, or part of the attention kernel.
        attn_output = self.attn.forward(q, k, v, attend, self.rope(cos, sin))
        if logits_index is not None:
            attn_output = attn_output.index_select(0, logits_index)
        return self.o_proj.forward(attn_output.flatten(1))

    def qkv(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of each head. OLMo 2 norms q and k."""
        return self.qkv_proj.heads(hidden_states)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        """Return the rotary embedding. Other architectures add QK norms, which are fused with it."""
        return Rope(cos, sin)


class LlamaMLP(Layer):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, build: BuildContext, *, reduce: bool = False) -> None:
        """Build the layers. Without `reduce`, the all-reduce is fused into the next input_layernorm, or the final norm."""
        check_activation(config)
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        # One GEMM. Some kernels apply the activation in its epilogue.
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build, bias=bias, silu_and_mul=True)
        self.down_proj = RowParallelLinear(inner, hidden, build, bias=bias, reduce=reduce)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T, H]."""
        return self.down_proj.forward(self.gate_up_proj.forward(x))


class LlamaDecoderLayer(Layer):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        build: BuildContext,
        attention: type[Any] = LlamaAttention,
        experts: type[Any] | None = None,
    ) -> None:
        """Build the layers. `experts` is the class of the MLP of sparse layers, in architectures with experts."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        self.self_attn = attention(config, index, build)
        self.post_attention_layernorm = RMSNorm(hidden, eps, build, all_reduce=True)
        if experts is None or config.moe is None or index in config.moe.dense_layers:
            self.mlp: Any = LlamaMLP(config, build)
        else:
            self.mlp = experts(config, config.moe, build)

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


class LlamaModel(Layer):
    """Embedding, decoder layers and the final norm."""

    def __init__(
        self, config: ModelConfig, build: BuildContext, layer: type[Any] = LlamaDecoderLayer, **parts: type[Any]
    ) -> None:
        """Build the layers. `layer` is the class of the decoder layers, and `parts` are classes that it is built with."""
        self._config, self._stage = config, build.stage(config)
        if self._stage.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position, build)
        if config.sliding_rope is not None:
            self.rotary_emb_local = RotaryEmbedding(config.sliding_rope, config.max_position, build)
        self.layers = {index: layer(config, index, build, **parts) for index in self._stage.layers}
        if self._stage.has_lm_head:
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

        Between pipeline stages, `intermediate` and the result are hidden states and residual, [2, T, H]. They are only hidden
        states, [1, T, H], if the decoder layers have no separate residual (OLMo 2).
        """
        cos_sin = self.cos_sin(positions)
        hidden_states = self.embed(input_ids) if intermediate is None else intermediate[0]
        residual = None if intermediate is None or len(intermediate) == 1 else intermediate[1]
        *layers, last = self.layers.values()
        for layer, (cos, sin) in zip(layers, cos_sin, strict=False):
            hidden_states, residual = layer.forward(hidden_states, residual, cos, sin, attend)
        # After the last attention, only the tokens whose logits are computed are needed.
        hidden_states, residual = last.forward(hidden_states, residual, *cos_sin[-1], attend, logits_index)
        if not self._stage.has_lm_head:
            return hidden_states[None] if residual is None else torch.stack((hidden_states, residual))
        return self.norm.add(hidden_states, residual)[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, [T, H]. Gemma scales them."""
        return self.embed_tokens.forward(input_ids)

    def cos_sin(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cos and sin of the positions for each layer. Gemma 3 and OLMo 3 have others in layers with a sliding window."""
        full = self.rotary_emb.forward(positions)
        if self._config.sliding_rope is None:
            return [full] * len(self.layers)
        local = self.rotary_emb_local.forward(positions)
        return [full if self._config.sliding_windows[index] is None else local for index in self.layers]


class LlamaForCausalLM(CausalLM):
    """Llama with its LM head."""

    decoder: ClassVar[Any] = LlamaModel
    fused_projections: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default, and sliding windows."""
        return unsupported_keys(config, use_sliding_window=False)
