"""Conversion of Hugging Face configs, from transformers 4 or 5, to a `ModelConfig`.

The file is long because all rules of one format are in it: defaults, fixed values, and checks of each key.
"""

from collections.abc import Mapping
from typing import Any

from minisgl_core.config.keys import MAX_CONTEXT, MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, Keys, is_number
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.model_config import ROPE_KINDS, ModelConfig, MoeConfig, RopeConfig
from minisgl_core.errors import ModelFormatError

_QWEN_WINDOW: Mapping[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"use_sliding_window": False},
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen2ForCausalLM": {"attention_bias": True, "o_bias": False, "max_window_layers": 28, **_QWEN_WINDOW},
    "Qwen3ForCausalLM": {"head_dim": 128, "max_window_layers": 28, **_QWEN_WINDOW},
    "Qwen3MoeForCausalLM": {"moe_intermediate_size": 768, **_QWEN_WINDOW},
}
"""Defaults of missing keys that differ between transformers' config classes, and Qwen2's biases, which transformers hard-codes.
An architecture whose entry lacks ``max_window_layers`` ignores that key."""

_SAME_WINDOW = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"})
"""Architectures that do not read ``layer_types``: all layers have the same window, or none has one."""


def model_config(
    raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, tokenizer_eos: int | None = None
) -> ModelConfig:
    """Normalise a ``config.json``. The function is long because one call lists all fields of the config.

    Unknown architectures are read by the same keys, so that a plugin's model needs no code in this file. `ModelConfig.raw` has
    all other keys, and `Model.standard_config` translates keys with other names.

    Args:
        raw: the config, with RoPE settings in ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5).
        generation_config: a ``generation_config.json``; its EOS ids are added.
        tokenizer_eos: the tokenizer's EOS id, which is added, because fine-tuned models may declare an EOS only there.

    Raises:
        ModelFormatError: a key is missing, of the wrong type, or contradicts another; the message names it.
    """
    architecture = architecture_of(raw)
    defaults = _CLASS_DEFAULTS.get(architecture, {})
    keys = Keys({**defaults, **raw})
    if keys.get("is_causal", True) is not True:
        raise keys.error("is_causal", f"is not supported by {architecture}; only true is")
    hidden_size = keys.positive_whole("hidden_size")
    num_q_heads = keys.whole("num_attention_heads", 1, maximum=MAX_HEADS)
    num_layers = keys.whole("num_hidden_layers", 1, maximum=MAX_LAYERS)
    intermediate_size = keys.positive_whole("intermediate_size")
    num_kv_heads = keys.positive_whole("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise keys.error("num_attention_heads", f"is not a multiple of num_key_value_heads={num_kv_heads}")
    if keys.get("head_dim") is None and hidden_size % num_q_heads:
        raise ModelFormatError(
            f"config: head_dim is missing, and hidden_size={hidden_size} is not a multiple of num_attention_heads={num_q_heads}"
        )
    head_dim = keys.whole("head_dim", 1, hidden_size // num_q_heads, MAX_HEADS)
    max_position = keys.whole("max_position_embeddings", 1, maximum=MAX_CONTEXT)
    rope, sliding_rope = _ropes(keys, head_dim, max_position)
    attention_bias = keys.flag("attention_bias")
    vocab_size = keys.positive_whole("vocab_size")
    eos_token_ids = [
        *_token_ids(raw, "eos_token_id"),
        *_token_ids(generation_config or {}, "eos_token_id", "generation_config"),
        *([] if tokenizer_eos is None else [tokenizer_eos]),
    ]
    quantization = CheckpointQuantization.of(raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        # Configs with RoPE settings per kind of layer, such as Gemma 3's, have the scaled context in this key.
        max_position=max_position if sliding_rope else _scaled_context(max_position, rope),
        rms_norm_eps=keys.above("rms_norm_eps", 0.0, 1e-6),
        rope=rope,
        dtype=keys.text("dtype", keys.text("torch_dtype", "float32")).removeprefix("torch."),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        qkv_bias=attention_bias,
        o_bias=keys.flag("o_bias", attention_bias),
        mlp_bias=keys.flag("mlp_bias"),
        sliding_windows=_sliding_windows(keys, num_layers, architecture),
        moe=_moe(keys, num_layers, intermediate_size),
        bos_token_id=next(iter(_token_ids(raw, "bos_token_id")), None),
        # Some checkpoints list ids beyond the vocabulary, or -1 for none.
        eos_token_ids=tuple(token for token in dict.fromkeys(eos_token_ids) if 0 <= token < vocab_size),
        quantization="" if quantization is None else quantization.method,
        # Gemma 2 and 3 use the second key.
        hidden_act=keys.text("hidden_act", keys.text("hidden_activation", "silu")),
        soft_cap=keys.positive_or_none("attn_logit_softcapping"),
        has_sinks=keys.flag("attention_sinks"),
        value_head_dim=None if keys.get("v_head_dim") is None else keys.positive_whole("v_head_dim"),
        sliding_rope=sliding_rope,
        raw=raw,
    )


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the name of the model's class in a ``config.json``, or raise ModelFormatError if there is none."""
    names = raw.get("architectures")
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        raise ModelFormatError("config: architectures is missing; it names the model's class, such as LlamaForCausalLM")
    return names[0]


def _token_ids(raw: Mapping[str, Any], key: str, where: str = "config") -> list[int]:
    """Return the token ids of a key, which has one id or a list; empty if it is missing."""
    value = raw.get(key)
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelFormatError(f"{where}: {key}={value!r} is neither a token id nor a list of token ids")
    return list(ids)


def _rope_settings(keys: Keys) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the value of the key with the RoPE settings.

    If a config has both keys, transformers uses ``rope_scaling`` and ignores ``rope_parameters`` with its ``rope_theta``. If they
    differ, that is an error.
    """
    scaling, parameters = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    if not (scaling and parameters):
        return ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    used = {"rope_theta": keys.get("rope_theta", 10000.0), "rope_type": scaling.get("type", "default"), **scaling}
    for key, value in parameters.items():
        if value not in (None, used.get(key)) and (key, value) not in (("rope_type", "default"), ("type", "default")):
            raise ModelFormatError(
                f"config: rope_parameters has {key}={value!r} and rope_scaling has {key}={used.get(key)!r}; transformers "
                "ignores rope_parameters if a config has both: move all settings into one of them"
            )
    return "rope_scaling", scaling


def _ropes(keys: Keys, head_dim: int, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the RoPE of full-attention layers, and that of layers with a sliding window; None if it is the same."""
    by_kind = keys.get("rope_parameters")
    if not isinstance(by_kind, Mapping) or set(by_kind) != {"full_attention", "sliding_attention"}:
        return _rope(keys, head_dim, max_position), None
    full, sliding = (
        _rope(keys.replaced("rope_parameters", by_kind[kind]), head_dim, max_position)
        for kind in ("full_attention", "sliding_attention")
    )
    return full, sliding


def _rope(keys: Keys, head_dim: int, max_position: int) -> RopeConfig:
    """Read the RoPE settings. The function is long because one call lists all fields of the config."""
    name, raw = _rope_settings(keys)
    is_per_layer = any(isinstance(value, Mapping) for key, value in raw.items() if key.endswith("_attention"))
    rope = Keys({} if is_per_layer else raw, name)
    kind = "per_layer" if is_per_layer else rope.text("rope_type", rope.text("type", "default"))
    fraction = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if not 0 < fraction <= 1:
        raise ModelFormatError(f"config: partial_rotary_factor={fraction:g} is not above 0 and at most 1")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ModelFormatError(
            f"config: head_dim={head_dim} and partial_rotary_factor={fraction:g} give {rotary_dim} rotary dimensions; "
            "their number must be even and at most head_dim"
        )
    theta = rope.above("rope_theta", 1.0, keys.above("rope_theta", 1.0, 10000.0))
    if kind not in ROPE_KINDS:  # a plugin's model may implement it; `RotaryEmbedding` refuses it
        return RopeConfig(theta, rotary_dim, kind, original_max_position=max_position)
    original = _original_max_position(keys, rope, kind, max_position)
    implied_factor = max_position / original if kind == "yarn" and original < max_position else None
    if kind == "longrope":
        implied_factor = max(max_position / original, 1.0)
    llama3 = kind == "llama3"
    config = RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=kind,
        factor=1.0 if kind == "default" else rope.above("factor", 0.0, implied_factor),
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if llama3 else 4.0),
        beta_fast=rope.above("beta_fast", 0.0, 32.0),
        beta_slow=rope.above("beta_slow", 0.0, 1.0),
        attention_factor=rope.positive_or_none("attention_factor"),
        mscale=rope.positive_or_none("mscale") or 0.0,
        mscale_all_dim=rope.positive_or_none("mscale_all_dim") or 0.0,
        truncate=rope.flag("truncate", True),
        freq_factors=rope.numbers("freq_factors", rotary_dim // 2),
        short_factors=rope.numbers("short_factor", rotary_dim // 2, required=kind == "longrope"),
        long_factors=rope.numbers("long_factor", rotary_dim // 2, required=kind == "longrope"),
    )
    if llama3 and config.high_freq_factor <= config.low_freq_factor:
        raise ModelFormatError(f"{name}: high_freq_factor is not above low_freq_factor={config.low_freq_factor:g}")
    return config


def _original_max_position(keys: Keys, rope: Keys, kind: str, max_position: int) -> int:
    """Return the context of the unscaled model. As in transformers, a key next to the RoPE settings overrides theirs."""
    key = "original_max_position_embeddings"
    if kind not in ("llama3", "yarn", "longrope"):
        return max_position
    return keys.whole(key, 2, rope.whole(key, 2, max_position))  # LongRoPE divides by its logarithm, so 1 is too small


def _scaled_context(max_position: int, rope: RopeConfig) -> int:
    """Return the scaled context length. With ``linear`` and ``yarn``, ``max_position_embeddings`` may be the unscaled one.

    The context of ``dynamic`` stays unscaled. Beyond it, the rotation of every key would depend on the length of the sequence,
    but cached keys cannot be rotated again.
    """
    if rope.kind not in ("linear", "yarn"):
        return max_position
    stretched = max(max_position, rope.original_max_position * rope.factor)
    if stretched > MAX_CONTEXT:
        raise ModelFormatError(f"config: factor={rope.factor:g} of RoPE gives a context of over {MAX_CONTEXT} tokens")
    return int(stretched)


def _sliding_windows(keys: Keys, num_layers: int, architecture: str) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens; None for full attention.

    Without ``layer_types``, all layers have the window, or those from ``max_window_layers`` on if the architecture reads it.
    """
    uses = keys.flag("use_sliding_window", True)
    given = keys.get("sliding_window") is not None
    window = keys.whole("sliding_window", int(uses)) if given else None
    window = window if uses else None
    has_first = "max_window_layers" in _CLASS_DEFAULTS.get(architecture, {})
    first = keys.whole("max_window_layers", 0, 0) if has_first else 0
    windows = tuple(window if i >= first else None for i in range(num_layers))
    kinds = keys.get("layer_types")
    if kinds is None:
        return windows
    has_all = isinstance(kinds, (list, tuple)) and len(kinds) == num_layers
    if not has_all or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        fault = f"must have full_attention or sliding_attention per layer (num_hidden_layers={num_layers})"
        raise keys.error("layer_types", fault)
    if "sliding_attention" in kinds and window is None:
        raise ModelFormatError(
            "config: layer_types has sliding_attention, but sliding_window is not set or use_sliding_window is false"
        )
    by_kind = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture in _SAME_WINDOW and by_kind != windows:
        fault = f"contradicts sliding_window={window}, which {architecture} has in all layers"
        raise keys.error("layer_types", fault)
    return by_kind


def _moe(keys: Keys, num_layers: int, intermediate_size: int) -> MoeConfig | None:
    count = keys.get("num_experts", keys.get("num_local_experts", 0))
    if not count:
        return None
    name = "num_experts" if keys.get("num_experts") else "num_local_experts"
    if keys.get("num_local_experts", count) != count:
        raise keys.error("num_local_experts", f"contradicts num_experts={count!r}")
    num_experts, top_k = keys.positive_whole(name), keys.positive_whole("num_experts_per_tok")
    if num_experts * num_layers > MAX_EXPERTS:
        raise keys.error(name, f"times num_hidden_layers={num_layers} is over {MAX_EXPERTS}")
    if top_k > num_experts:
        raise keys.error("num_experts_per_tok", f"is greater than {name}={num_experts}")
    step, mlp_only = keys.positive_whole("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(mlp_only, (list, tuple)) or not all(is_number(each) for each in mlp_only):
        raise keys.error("mlp_only_layers", "is not a list of layers")
    dense = frozenset(mlp_only)  # the list may be long
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=keys.positive_whole("moe_intermediate_size", intermediate_size),
        norm_topk_prob=keys.flag("norm_topk_prob"),
        dense_layers=frozenset(i for i in range(num_layers) if i in dense or (i + 1) % step),
        activation=str(keys.get("expert_activation", "silu")),
        has_bias=keys.flag("expert_bias"),
        swiglu_limit=keys.positive_or_none("expert_swiglu_limit"),
    )
