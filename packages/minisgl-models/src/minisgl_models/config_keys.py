"""Keys of a ``config.json``: which of them an architecture refuses, and the rotary embeddings of each kind of layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError

_KINDS = ("full_attention", "sliding_attention")


def unsupported_keys(
    config: ModelConfig, *, partial_rotary: bool = False, experts: bool = False, **supported: Any
) -> list[str]:
    """Return one sentence per key whose value would change the model in another engine, but not in this architecture.

    Attention sinks are refused unless `supported` has them, and value heads of another size than key heads always.

    Args:
        config: of the model.
        partial_rotary: the architecture may rotate a part of each head.
        experts: the architecture has experts; a config without them is refused, otherwise one with them.
        supported: keys and the only value that each may have, if it is set at all.
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


def number(raw: Mapping[str, Any], key: str) -> float:
    """Return a key's value, which must be a finite number.

    Raises:
        ModelFormatError: it is not; the message names the key.
    """
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ModelFormatError(f"config: {key}={value!r} is not a number")
    return value


def whole_number(raw: Mapping[str, Any], key: str, least: int = 0) -> int:
    """Return a key's value, which must be a whole number of at least `least`.

    Raises:
        ModelFormatError: it is not; the message names the key.
    """
    value = number(raw, key)
    if value < least or value != int(value):
        raise ModelFormatError(f"config: {key}={value!r} is not a whole number of at least {least}")
    return int(value)


def rope_parameters_by_kind(raw: Mapping[str, Any], full_theta: float, sliding_theta: float) -> dict[str, Any]:
    """Return ``rope_parameters`` with an entry per kind of layer, as transformers 5 writes them.

    A ``rope_scaling`` (transformers 4) holds for layers with full attention only.

    Args:
        raw: the config.
        full_theta: ``rope_theta`` of the layers with full attention, unless their entry has one.
        sliding_theta: likewise, of the layers with a sliding window.

    Raises:
        ModelFormatError: an entry is not an object, or stands outside of both.
    """
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or not set(parameters) <= set(_KINDS):
        raise ModelFormatError(
            f"config: rope_parameters={parameters!r} must have one entry per kind of layer, {' and '.join(_KINDS)}"
        )
    full, sliding = (parameters.get(kind) or {} for kind in _KINDS)
    for name, each in (("rope_parameters", full), ("rope_parameters", sliding), ("rope_scaling", scaling)):
        if not isinstance(each, Mapping):
            raise ModelFormatError(f"config: {name} has {each!r}, which is not an object with parameters")
    return {
        "full_attention": {"rope_theta": full_theta, **full, **scaling},
        "sliding_attention": {"rope_theta": sliding_theta, **sliding},
    }
