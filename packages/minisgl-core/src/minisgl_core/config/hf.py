"""Conversion of Hugging Face configs, from transformers 4 or 5, to a `ModelConfig`.

The file is long because all rules of one format are in it: defaults, fixed values, and checks of each key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
"""Defaults of missing keys that differ between transformers' config classes, and values that an architecture fixes without a
key. An architecture whose entry lacks ``max_window_layers`` ignores that key."""

_WHOLE_HEADS: Mapping[str, Any] = {"partial_rotary_factor": 1.0, "v_head_dim": None}
_NO_BIASES: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"use_sliding_window": False, **_WHOLE_HEADS},
    "MistralForCausalLM": {**_NO_BIASES, **_WHOLE_HEADS},
    "Qwen2ForCausalLM": {"attention_bias": True, "mlp_bias": False, **_WHOLE_HEADS},
    "Qwen3ForCausalLM": {"mlp_bias": False, **_WHOLE_HEADS},
    "Qwen3MoeForCausalLM": {"mlp_bias": False, **_WHOLE_HEADS},
}
"""Keys that transformers' class of an architecture does not read, and the value whose meaning it has. Other engines read some of
them, so another value is refused, instead of ignored."""

_SAME_WINDOW = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"})
"""Architectures of which all layers have the same window, or none: they do not read ``layer_types``."""


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
    keys = _Keys({**defaults, **raw})
    _check_fixed(keys, architecture)
    hidden_size, num_q_heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    num_layers, intermediate_size = keys.positive("num_hidden_layers"), keys.positive("intermediate_size")
    num_kv_heads = keys.positive("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ModelFormatError(
            f"config: num_attention_heads={num_q_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    if keys.get("head_dim") is None and hidden_size % num_q_heads:
        raise ModelFormatError(
            f"config: head_dim is missing, and hidden_size={hidden_size} is not a multiple of num_attention_heads={num_q_heads}"
        )
    head_dim = keys.positive("head_dim", hidden_size // num_q_heads)
    max_position = keys.positive("max_position_embeddings")
    whole = _FIXED.get(architecture, {}).get("partial_rotary_factor")
    rope, sliding_rope = _ropes(keys, head_dim, max_position, whole)
    attention_bias = keys.flag("attention_bias")
    vocab_size = keys.positive("vocab_size")
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
        # A config with a rope per kind of layer states the scaled context.
        max_position=max_position if sliding_rope else _stretched(max_position, rope),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=rope,
        dtype=str(keys.get("dtype") or keys.get("torch_dtype") or "float32").removeprefix("torch."),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        qkv_bias=attention_bias,
        o_bias=keys.flag("o_bias", attention_bias),
        mlp_bias=keys.flag("mlp_bias"),
        sliding_windows=_sliding_windows(keys, num_layers, architecture),
        moe=_moe(keys, num_layers, intermediate_size),
        bos_token_id=_first(_token_ids(raw, "bos_token_id")),
        # Some checkpoints list ids beyond the vocabulary, or -1 for none.
        eos_token_ids=tuple(token for token in dict.fromkeys(eos_token_ids) if 0 <= token < vocab_size),
        quantization="" if quantization is None else quantization.method,
        # Gemma 2 and 3 use the second key.
        hidden_act=str(keys.get("hidden_act") or keys.get("hidden_activation") or "silu"),
        soft_cap=keys.above("attn_logit_softcapping", 0.0) if keys.get("attn_logit_softcapping") else None,
        has_sinks=keys.flag("attention_sinks"),
        value_head_dim=keys.positive("v_head_dim") if keys.get("v_head_dim") else None,
        sliding_rope=sliding_rope,
        raw=raw,
    )


class _Keys:
    """Typed lookups in a config, whose errors name the key."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config") -> None:
        self._raw, self._where = raw, where

    def replaced(self, key: str, value: Any) -> _Keys:
        return _Keys({**self._raw, key: value}, self._where)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._raw.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self._where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFormatError(f"{self._where}: {key}={value!r} is not a number")
        return float(value)

    def above(self, key: str, bound: float, default: float | None = None) -> float:
        value = self.number(key, default)
        if not bound < value < math.inf:
            raise ModelFormatError(f"{self._where}: {key}={value:g} is not above {bound:g}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value < 1 or not value.is_integer():
            raise ModelFormatError(f"{self._where}: {key}={value:g} is not a whole number of at least 1")
        return int(value)

    def numbers(self, key: str, count: int, is_needed: bool = False) -> tuple[float, ...]:
        """Return a list of `count` numbers above 0; empty if the key is missing and not needed."""
        values = self.get(key, ())
        if not isinstance(values, (list, tuple)) or any(not isinstance(v, (int, float)) or v <= 0 for v in values):
            raise ModelFormatError(f"{self._where}: {key} is not a list of numbers above 0")
        if len(values) != count and (values or is_needed):
            raise ModelFormatError(f"{self._where}: {key} has {len(values)} entries, not {count}")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self._where}: {key}={value!r} is neither true nor false")
        return value


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the name of the model's class in a ``config.json``.

    Raises:
        ModelFormatError: the config does not name one.
    """
    names = raw.get("architectures")
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        raise ModelFormatError("config: architectures is missing; it names the model's class, such as LlamaForCausalLM")
    return names[0]


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None


def _token_ids(raw: Mapping[str, Any], key: str, where: str = "config") -> list[int]:
    value = raw.get(key)
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelFormatError(f"{where}: {key}={value!r} is neither a token id nor a list of token ids")
    return list(ids)


def _check_fixed(keys: _Keys, architecture: str) -> None:
    """Refuse values of keys that the architecture does not read, unless they mean what it does.

    Raises:
        ModelFormatError: the error names the key.
    """
    for key, fixed in {"is_causal": True, **_FIXED.get(architecture, {})}.items():
        if keys.get(key, fixed) != fixed:
            remedy = "remove the key" if fixed is None else f"it supports {str(fixed).lower()} only"
            raise ModelFormatError(f"config: {key}={keys.get(key)!r} is not supported by {architecture}; {remedy}")


def _rope_settings(keys: _Keys) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the value of the key with the RoPE settings.

    Of a config with both keys, transformers takes ``rope_scaling`` and drops ``rope_parameters`` with its ``rope_theta``.

    Raises:
        ModelFormatError: the dropped settings differ from those that are taken.
    """
    settings = {name: keys.get(name, {}) for name in ("rope_scaling", "rope_parameters")}
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            raise ModelFormatError(f"config: {name}={value!r} is not an object with parameters")
    scaling, parameters = settings["rope_scaling"], settings["rope_parameters"]
    if not (scaling and parameters):
        return ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    taken = {"rope_theta": keys.get("rope_theta", 10000.0), "rope_type": scaling.get("type", "default"), **scaling}
    for key, value in parameters.items():
        if value not in (None, taken.get(key)) and (key, value) not in (("rope_type", "default"), ("type", "default")):
            raise ModelFormatError(
                f"config: rope_parameters has {key}={value!r} and rope_scaling has {key}={taken.get(key)!r}; transformers "
                "drops rope_parameters where a config has both: move all settings into one of them"
            )
    return "rope_scaling", scaling


def _ropes(
    keys: _Keys, head_dim: int, max_position: int, fixed_fraction: float | None
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rope of all layers and None, or that of full-attention layers and that of layers with a window."""
    by_kind = keys.get("rope_parameters")
    if not isinstance(by_kind, Mapping) or set(by_kind) != {"full_attention", "sliding_attention"}:
        return _rope(keys, head_dim, max_position, fixed_fraction), None
    full, sliding = (
        _rope(keys.replaced("rope_parameters", by_kind[kind]), head_dim, max_position, fixed_fraction)
        for kind in ("full_attention", "sliding_attention")
    )
    return full, sliding


def _rope(keys: _Keys, head_dim: int, max_position: int, fixed_fraction: float | None) -> RopeConfig:
    """Read the RoPE settings. The function is long because one call lists all fields of the config."""
    name, raw = _rope_settings(keys)
    is_per_layer = any(isinstance(value, Mapping) for value in raw.values())
    rope = _Keys({} if is_per_layer else raw, name)
    kind = "per_layer" if is_per_layer else str(rope.get("rope_type", rope.get("type", "default")))
    fraction = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if fixed_fraction not in (None, fraction):
        raise ModelFormatError(
            f"{name}: partial_rotary_factor={fraction:g} is not supported by this architecture; it rotates whole heads"
        )
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ModelFormatError(
            f"config: head_dim={head_dim} and partial_rotary_factor={fraction:g} give {rotary_dim} rotary dimensions; "
            "their number must be even and at most head_dim"
        )
    theta = rope.above("rope_theta", 1.0, keys.above("rope_theta", 1.0, 10000.0))
    if kind not in ROPE_KINDS:
        return RopeConfig(theta, rotary_dim, kind, original_max_position=max_position)
    original = _original_max_position(keys, rope, kind, max_position)
    implied_factor = max_position / original if kind == "yarn" and original < max_position else None
    if kind == "longrope":
        implied_factor = max(max_position / original, 1.0)
    llama3 = kind == "llama3"
    attention_factor = rope.get("attention_factor")
    config = RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=kind,
        factor=1.0 if kind == "default" else rope.above("factor", 0.0, implied_factor),
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if llama3 else 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=None if attention_factor is None else rope.number("attention_factor"),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=bool(raw.get("truncate", True)),
        freq_factors=rope.numbers("freq_factors", rotary_dim // 2),
        short_factors=rope.numbers("short_factor", rotary_dim // 2, is_needed=kind == "longrope"),
        long_factors=rope.numbers("long_factor", rotary_dim // 2, is_needed=kind == "longrope"),
    )
    if llama3 and config.high_freq_factor <= config.low_freq_factor:
        raise ModelFormatError(f"{name}: high_freq_factor is not above low_freq_factor={config.low_freq_factor:g}")
    return config


def _original_max_position(keys: _Keys, rope: _Keys, kind: str, max_position: int) -> int:
    """Return the context of the unscaled model. As in transformers, a key beside the RoPE settings replaces theirs."""
    key = "original_max_position_embeddings"
    if kind not in ("llama3", "yarn", "longrope"):
        return max_position
    return keys.positive(key, rope.positive(key, max_position))


def _stretched(max_position: int, rope: RopeConfig) -> int:
    """Return the scaled context length. Some kinds of RoPE scaling keep the unscaled one in ``max_position_embeddings``.

    ``dynamic`` is not among them. Beyond the unscaled context, its rotation of every key depends on the length of the sequence,
    and cached keys cannot be rotated again.
    """
    if rope.kind in ("linear", "yarn"):
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _sliding_windows(keys: _Keys, num_layers: int, architecture: str) -> tuple[int | None, ...]:
    uses = keys.flag("use_sliding_window", True)
    window = keys.positive("sliding_window") if uses and keys.get("sliding_window") is not None else None
    has_first = "max_window_layers" in _CLASS_DEFAULTS.get(architecture, {})
    first = int(keys.number("max_window_layers", 0)) if has_first else 0
    windows = tuple(window if i >= first else None for i in range(num_layers))
    kinds = keys.get("layer_types")
    if kinds is None:
        return windows
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelFormatError(
            f"config: layer_types must have full_attention or sliding_attention per layer (num_hidden_layers={num_layers})"
        )
    if "sliding_attention" in kinds and window is None:
        raise ModelFormatError(
            "config: layer_types has sliding_attention, but sliding_window is not set or use_sliding_window is false"
        )
    by_kind = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture in _SAME_WINDOW and by_kind != windows:
        raise ModelFormatError(
            f"config: layer_types={list(kinds)} contradicts sliding_window={window}, which {architecture} has in all layers"
        )
    return by_kind


def _moe(keys: _Keys, num_layers: int, intermediate_size: int) -> MoeConfig | None:
    count = keys.get("num_experts", keys.get("num_local_experts", 0))
    if not count:
        return None
    name = "num_experts" if keys.get("num_experts") else "num_local_experts"
    if keys.get("num_local_experts", count) != count:
        raise ModelFormatError(
            f"config: num_local_experts={keys.get('num_local_experts')!r} contradicts num_experts={count!r}"
        )
    num_experts, top_k = keys.positive(name), keys.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelFormatError(f"config: num_experts_per_tok={top_k} is greater than {name}={num_experts}")
    step, mlp_only = keys.positive("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(mlp_only, (list, tuple)):
        raise ModelFormatError(f"config: mlp_only_layers={mlp_only!r} is not a list of layers")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=keys.positive("moe_intermediate_size", intermediate_size),
        norm_topk_prob=keys.flag("norm_topk_prob"),
        dense_layers=frozenset(i for i in range(num_layers) if i in mlp_only or (i + 1) % step),
        activation=str(keys.get("expert_activation", "silu")),
        has_bias=keys.flag("expert_bias"),
        swiglu_limit=keys.above("expert_swiglu_limit", 0.0) if keys.get("expert_swiglu_limit") else None,
    )
