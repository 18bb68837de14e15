"""Model config, normalised from Hugging Face's keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Scaling rules that `minisgl_core.layers.rotary` implements."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Config of rotary embeddings. ``kind`` and its fields follow transformers' ``modeling_rope_utils``.

    The parameters of a kind outside of `ROPE_KINDS` are only in `ModelConfig.raw`.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: rotated dimensions of a head.
        kind: the scaling rule; ``per_layer`` if each kind of layer has its own parameters, which only plugins may support. For
            exactly the kinds full and sliding attention, there are two `RopeConfig` instead: see `ModelConfig.sliding_rope`.
        factor: factor of context extension; 1 for ``default``.
        original_max_position: context of the unscaled model, in tokens.
        low_freq_factor, high_freq_factor: bounds of the llama3 rule.
        beta_fast, beta_slow: bounds of the YaRN rule, in rotations.
        attention_factor: factor of YaRN and LongRoPE on cos and sin; None for the rule's own.
        mscale, mscale_all_dim: DeepSeek's parameters of the YaRN factor; 0 for none.
        truncate: True if YaRN rounds its correction range to whole dimensions.
        freq_factors: divisor of each frequency (GGUF files store the llama3 rule in this form); empty for none.
        short_factors, long_factors: LongRoPE's divisors of each frequency. The short ones apply in an engine whose context
            is at most `original_max_position`, the long ones in an engine with a longer context.
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
    """Config of mixture-of-experts layers.

    Attributes:
        num_experts: experts per layer.
        top_k: experts per token.
        intermediate_size: width of an expert's hidden layer.
        norm_topk_prob: True if the selected experts' probabilities are normalised to sum to 1.
        dense_layers: indices of the layers with a plain MLP.
        activation, has_bias, swiglu_limit: fields of the experts' `minisgl_core.contracts.moe.MoeSpec`. Models set them by
            the keys ``expert_activation``, ``expert_bias`` and ``expert_swiglu_limit`` in `standard_config`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    dense_layers: frozenset[int] = frozenset()
    activation: str = "silu"
    has_bias: bool = False
    swiglu_limit: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Properties of a model that the engine and the layers read. `minisgl_core.config.hf.model_config` builds it.

    Attributes:
        architecture: the Hugging Face class name, which is also the provider's name.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of a dense MLP.
        num_layers: decoder layers.
        num_q_heads: query heads on all ranks together.
        num_kv_heads: KV heads on all ranks together.
        head_dim: dimension of a head.
        max_position: context length, in tokens.
        rms_norm_eps: epsilon of the norms.
        rope: rotary embedding; of the layers with full attention, if `sliding_rope` is set.
        dtype: dtype the checkpoint was saved for, such as ``bfloat16``.
        tie_embeddings: True if the LM head's weight is the embedding.
        qkv_bias: True if the q, k and v projections have biases.
        o_bias: True if the attention's output projection has a bias.
        mlp_bias: True if the MLP's projections have biases.
        sliding_windows: window of each layer in tokens, None for full attention; one entry per layer.
        moe: config of the experts; None for a dense model.
        bos_token_id: BOS token, or None.
        eos_token_ids: all EOS tokens, including those of generation_config and the tokenizer.
        quantization: quantization method of the checkpoint, such as ``fp8``; empty if it is not quantized.
        hidden_act: activation of the MLP, by transformers' name.
        soft_cap: cap of the attention scores, as in Gemma 2; None for none. The model's layers must apply it.
        has_sinks: True if attention layers have sinks; models set ``attention_sinks`` in `standard_config` for this.
        value_head_dim: head dimension of values; None for `head_dim`.
        sliding_rope: rotary embedding of the layers with a sliding window (Gemma 3, OLMo 3); None if all layers have `rope`.
        raw: the config as `Model.standard_config` returns it, defaults included.
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
    sliding_rope: RopeConfig | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False, compare=False)
