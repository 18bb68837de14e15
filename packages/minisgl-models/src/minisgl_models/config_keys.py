"""Keys of a ``config.json``: those that an architecture refuses, defaults, and types and RoPE parameters of layers."""

from collections.abc import Callable, Mapping
from typing import Any

from minisgl_core.config.keys import MAX_LAYERS, Keys
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError

_LAYER_TYPES = ("full_attention", "sliding_attention")
_NULLABLE = frozenset(
    {
        "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "hidden_activation", "num_key_value_heads", "rope_theta",
        "sliding_window",
    }
)  # fmt: skip
"""Keys that may be null: there is no such cap or window, or the value follows from other keys."""


def unsupported_keys(
    config: ModelConfig, *, partial_rotary: bool = False, experts: bool = False, **supported: Any
) -> list[str]:
    """Return one sentence per key whose value this architecture does not implement.

    Attention sinks are refused unless `supported` has them. Value heads of another size than key heads are always refused.

    Args:
        config: the model's config.
        partial_rotary: the architecture may rotate a part of each head.
        experts: True to refuse configs without experts, False to refuse those with experts.
        supported: the only value that a key may have, by key. A missing or null key is always accepted.
    """
    supported = {"attention_sinks": False, "v_head_dim": None, **supported}
    reasons = [
        f"{config.architecture} does not support {key}={config.raw[key]!r} in the config; "
        + ("remove the key" if value is None else f"only {value!r} is possible")
        for key, value in supported.items()
        if config.raw.get(key) not in (None, value)
    ]
    if experts and not config.moe:
        reasons.append(f"{config.architecture} needs experts (num_experts in the config)")
    if config.moe and not experts:
        reasons.append(f"{config.architecture} has no experts (num_experts in the config)")
    if config.rope.rotary_dim < config.head_dim and not partial_rotary:
        reasons.append(f"{config.architecture} rotates whole heads; partial_rotary_factor in the config must be 1")
    return reasons


def with_defaults(defaults: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the defaults of missing keys.

    A key whose default is a float takes numbers above 0, and one whose default is an int takes integers of at least 0. Other
    keys take a boolean or a string, as their default is. Keys of `_NULLABLE` may be null.

    Raises:
        ModelFormatError: a value has another type than its key's default; the message names the key.
    """
    given = Keys(raw)
    for key in defaults.keys() & raw.keys():
        if raw[key] is None and key not in _NULLABLE:
            raise given.error(key, "is null; remove the key, or set a value")
        # The calls only check the value. Their `default` is for a null.
        if isinstance(defaults[key], bool):
            given.flag(key)
        elif isinstance(defaults[key], int):
            given.whole(key, minimum=0, default=0)
        elif isinstance(defaults[key], float):
            given.above(key, bound=0.0, default=1.0)
        else:
            given.text(key)
    return {**defaults, **raw}


def whole_number(raw: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    """Return a number of layers, experts or groups, which must be a whole number from `minimum` to `MAX_LAYERS`.

    Raises:
        ModelFormatError: it is not; the message names the key.
    """
    return Keys(raw).whole(key, minimum, maximum=MAX_LAYERS)


def layer_types(config: Mapping[str, Any], has_window: Callable[[int], bool]) -> list[str]:
    """Return ``layer_types``; if the config has none, `has_window` selects the layers with a sliding window by their index.

    Raises:
        ModelFormatError: the number of layers is invalid.
    """
    full, sliding = _LAYER_TYPES
    indices = range(whole_number(config, "num_hidden_layers", 1))
    return config.get("layer_types") or [sliding if has_window(index) else full for index in indices]


def rope_parameters_by_layer_type(raw: Mapping[str, Any], full_theta: float, sliding_theta: float) -> dict[str, Any]:
    """Return ``rope_parameters`` with an entry per layer type, as transformers 5 writes them.

    `full_theta` and `sliding_theta` are the ``rope_theta`` of entries without one. A ``rope_scaling`` (transformers 4) applies to
    layers with full attention only.

    Raises:
        ModelFormatError: an entry is not an object, or its name is not a layer type.
    """
    parameters, scaling = Keys(raw).mapping("rope_parameters"), Keys(raw).mapping("rope_scaling")
    if not set(parameters) <= set(_LAYER_TYPES):
        raise ModelFormatError(
            f"config: rope_parameters={parameters!r} must have one entry per layer type, {' and '.join(_LAYER_TYPES)}"
        )
    full, sliding = (Keys(parameters, "config: rope_parameters").mapping(each) for each in _LAYER_TYPES)
    return {
        "full_attention": {"rope_theta": full_theta, **full, **scaling},
        "sliding_attention": {"rope_theta": sliding_theta, **sliding},
    }
