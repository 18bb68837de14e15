"""Random JSON schemas that structured outputs support; their values are short."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ["name", "size", "is_open", "größe", "a b", 'quo"te', "tags", "x", "line\nbreak"]


def random_schema(seed: int) -> dict[str, Any]:
    """Return the schema of a seed."""
    rng = random.Random(seed)
    schema = _object(rng, depth=2)
    if rng.random() < 0.3:
        schema["$defs"] = {"item": _any(rng, depth=0)}
        schema["properties"]["linked"] = {"$ref": "#/$defs/item"}
        schema["required"] = [*schema["required"], "linked"]
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _enum, _simple]
    if depth == 0:
        return rng.choice(leaves)(rng)
    kind = rng.random()
    if kind < 0.25:
        return _object(rng, depth - 1)
    if kind < 0.45:
        return _array(rng, depth - 1)
    if kind < 0.55:
        return {"anyOf": [_any(rng, depth - 1), {"type": "null"}, _integer(rng)]}
    return rng.choice(leaves)(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    properties = {name: _any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_any(rng, 0), _any(rng, 0)], "items": False, "minItems": 2}
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _string(rng: random.Random) -> dict[str, Any]:
    more: list[dict[str, Any]] = [
        {"maxLength": rng.randint(0, 6)},
        {"minLength": 2, "maxLength": 5},
        {"pattern": "^[a-f]{2,4}-[0-9]{3}$"},
        {"pattern": "^(red|green)?$"},
        {"format": rng.choice(["date", "time", "uuid", "ipv4"])},
    ]
    return {"type": "string"} | rng.choice(more)


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    bounds: list[dict[str, Any]] = [
        {"minimum": low, "maximum": low + rng.randint(0, 1000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 10},
        {"minimum": 0, "maximum": 100, "multipleOf": rng.randint(2, 9)},
    ]
    return {"type": "integer"} | rng.choice(bounds)


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-5, 5) / 2
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 9)}


def _enum(rng: random.Random) -> dict[str, Any]:
    values: list[Any] = ["red", "blau", "", 1, 2.5, None, True, {"a": [1]}, "日本"]
    return {"enum": rng.sample(values, rng.randint(1, 4))} if rng.random() < 0.7 else {"const": rng.choice(values)}


def _simple(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}
