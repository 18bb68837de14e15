"""Typed lookups in a ``config.json``, whose errors name the key, its value and what is allowed."""

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from minisgl_core.errors import ModelFormatError

MAX_LAYERS = 1024
"""Maximum number of layers. Lists with an entry per layer are allocated before a checkpoint's tensors are read."""
MAX_HEADS = 2**16
"""Maximum number of heads, and of dimensions per head. The loops over allowed ``--tp`` and RoPE frequencies are this long."""
MAX_EXPERTS = 2**16
"""Maximum number of experts in all layers together. The names of each expert's tensors are listed before any of them is read."""
MAX_CONTEXT = 2**24
"""Longest context in tokens. RoPE's tables have an entry per position."""
MAX_INT = 2**31 - 1
"""Largest whole number of a config, which is the largest int32."""
_LAYER_COUNT = re.compile(r"(n|num)_(\w+_)?layers?|\w+_layers|first_k_dense_replace")
"""Keys whose values are numbers of layers."""


class Keys:
    """Keys of a config. A null counts as a missing key."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config") -> None:
        self._raw, self._where = raw, where

    def replaced(self, key: str, value: Any) -> "Keys":
        """Return a copy with another value of `key`."""
        return Keys({**self._raw, key: value}, self._where)

    def error(self, key: str, fault: str) -> ModelFormatError:
        """Return the error that a value is wrong; `fault` is a predicate, such as "is not a number"."""
        return ModelFormatError(f"{self._where}: {key}={reprlib.repr(self._raw.get(key))} {fault}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of any type."""
        value = self._raw.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self._where}: {key} is missing")
        if not is_number(value):
            raise self.error(key, "is not a number")
        return float(value)

    def above(self, key: str, bound: float, default: float | None = None) -> float:
        """Return a number above `bound`."""
        value = self.number(key, default)
        if value <= bound:
            raise ModelFormatError(f"{self._where}: {key}={value:g} is not above {bound:g}")
        return value

    def positive_or_none(self, key: str) -> float | None:
        """Return a number above 0; None if the key is missing, or 0."""
        return self.above(key, 0.0) if self.number(key, 0.0) else None

    def whole(self, key: str, minimum: int = 0, default: int | None = None, maximum: int = MAX_INT) -> int:
        """Return a whole number from `minimum` to `maximum`."""
        value = self.number(key, default)
        if not value.is_integer() or not minimum <= value <= maximum:
            bound = f" and at most {maximum}" if value > maximum else ""
            raise ModelFormatError(
                f"{self._where}: {key}={value:.10g} is not a whole number of at least {minimum}{bound}"
            )
        return int(value)

    def positive_whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        return self.whole(key, 1, default)

    def numbers(self, key: str, count: int, required: bool = False) -> tuple[float, ...]:
        """Return a list of `count` numbers above 0; empty if the key is missing and not `required`."""
        values = self.get(key, ())
        if not isinstance(values, (list, tuple)) or any(not is_number(each) or each <= 0 for each in values):
            raise self.error(key, "is not a list of numbers above 0")
        if len(values) != count and (values or required):
            raise ModelFormatError(f"{self._where}: {key} has {len(values)} entries, not {count}")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return True or False."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "is not a string")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object; empty if the key is missing."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "is not an object with parameters")
        return value


def is_number(value: Any) -> bool:
    """Return True if a value is a finite number, but not a boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**1000 and math.isfinite(value)  # a larger int would not fit in a float


def check_layer_counts(raw: Mapping[str, Any]) -> None:
    """Refuse numbers of layers beyond `MAX_LAYERS`, also in the configs of a multimodal model."""
    configs = [raw]
    for config in configs:  # without recursion, as a config may nest more deeply than Python's limit
        for key, value in config.items():
            if isinstance(value, Mapping):
                configs.append(value)
            elif _LAYER_COUNT.fullmatch(key) and isinstance(value, (int, float)) and not value <= MAX_LAYERS:
                raise Keys(config).error(key, f"is not at most {MAX_LAYERS}")
