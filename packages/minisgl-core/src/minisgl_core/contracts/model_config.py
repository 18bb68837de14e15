"""The model's config, normalised from what Hugging Face checkpoints write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""The scaling rules that `minisgl_core.layers.rotary` knows."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. ``kind`` and the fields it uses follow transformers' ``modeling_rope_utils``.

    A kind that is not among `ROPE_KINDS` comes without parameters of its own; they are in `ModelConfig.raw`.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: dimensions of a head that rotate.
        kind: the scaling rule; ``per_layer`` where the config has a set of parameters for each kind of layer.
        factor: how far the context is stretched; 1 for ``default``.
        original_max_position: context of the unscaled model, in tokens.
        low_freq_factor, high_freq_factor: bounds of the llama3 rule.
        beta_fast, beta_slow: bounds of the YaRN rule, in rotations.
        attention_factor: factor of YaRN and LongRoPE on cos and sin; None for the rule's own.
        mscale, mscale_all_dim: DeepSeek's parameters of the YaRN factor; 0 for none.
        truncate: whether YaRN rounds its correction range to whole dimensions.
        freq_factors: what each frequency is divided by (GGUF files hold the llama3 rule in this form); empty for none.
        short_factors, long_factors: what LongRoPE divides each frequency by: the first in an engine whose context is within
            `original_max_position`, the others in one of a longer context.
    """

    theta: float = 10000.0
    rotary_dim: int = 0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts.

    Attributes:
        num_experts: experts in a layer.
        top_k: experts a token uses.
        intermediate_size: width of an expert's hidden layer.
        norm_topk_prob: whether the chosen experts' probabilities are rescaled to sum to 1.
        dense_layers: indices of the layers with a plain MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Properties of a model that the engine and the layers read. Built by `minisgl_core.config.hf.model_config`.

    Attributes:
        architecture: the Hugging Face class name, which is also the provider's name.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of a dense MLP.
        num_layers: decoder layers.
        num_q_heads: query heads of the whole model.
        num_kv_heads: KV heads of the whole model.
        head_dim: dimension of a head.
        max_position: context length, in tokens.
        rms_norm_eps: epsilon of the norms.
        rope: rotary embedding.
        dtype: dtype the checkpoint was saved for, such as ``bfloat16``.
        tie_embeddings: whether the output matrix is the embedding.
        qkv_bias: whether the q, k and v projections have biases.
        o_bias: whether the attention's output projection has one.
        mlp_bias: whether the MLP's projections have biases.
        sliding_windows: window of each layer in tokens, None for full attention; one entry a layer.
        moe: experts, or None.
        bos_token_id: first token of a sequence, where the model has one.
        eos_token_ids: every token that ends a sequence, generation_config's and the tokenizer's included.
        quantization: how the checkpoint's matrices are quantised, such as ``fp8``; empty where they are not.
        hidden_act: the MLP's activation, by transformers' name.
        soft_cap: cap of the attention scores, as Gemma 2 has it; None for none. The model's layers must apply it.
        has_sinks: the attention layers have sinks; a class says so by ``attention_sinks`` in its `standard_config`.
        value_head_dim: head dimension of values; None for `head_dim`.
        raw: the config as read.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    dtype: str
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    moe: MoeConfig | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: str = ""
    hidden_act: str = "silu"
    soft_cap: float | None = None
    has_sinks: bool = False
    value_head_dim: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False, compare=False)
