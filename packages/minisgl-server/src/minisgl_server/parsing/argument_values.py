"""Converts the text of an argument to JSON, as the JSON schema of a function's parameters asks."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

STRING = frozenset({"string"})
_ANY = STRING | {"null", "boolean", "integer", "number", "array", "object"}
_TYPES: dict[type, str] = {
    str: "string",
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
_MAX_SCHEMAS = 64
"""Maximum number of schemas to follow for one argument. They may refer to each other, and a client may send any."""


def argument_types(parameters: Any, name: str) -> frozenset[str]:
    """Return the JSON types that the schema of a function's parameters allows for an argument; all if it does not tell."""
    schema = parameters if isinstance(parameters, Mapping) else {}
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    types: set[str] = set()
    pending = [schema.get("additionalProperties") if found is None else found]
    for _ in range(_MAX_SCHEMAS):
        if not pending:
            return frozenset(types)
        new, more = _types(pending.pop(), schema)
        types |= new
        pending += more[:_MAX_SCHEMAS]
    return _ANY


def _types(schema: Any, root: Mapping[str, Any]) -> tuple[frozenset[str], list[Any]]:
    """Return the types that a schema allows, and the schemas whose types it allows, too."""
    if not isinstance(schema, Mapping):
        return _ANY, []
    if isinstance(types := schema.get("type"), str):
        return frozenset({types}), []
    if isinstance(types, list):
        return frozenset(filter(lambda each: isinstance(each, str), types)), []
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(_TYPES[type(value)] for value in values[:_MAX_SCHEMAS]), []
    if isinstance(reference := schema.get("$ref"), str):
        return frozenset(), [_resolve(reference, root)]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(schemas := schema.get(keyword), list) and schemas:
            return frozenset(), schemas
    return _ANY, []


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of a reference such as ``#/$defs/unit``, or None."""
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:_MAX_SCHEMAS]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def to_json(text: str, types: frozenset[str]) -> str:
    """Return an argument as JSON: as it is if it is JSON of one of the types, and else as a string."""
    literal = text.strip()
    if "string" not in types and literal in ("True", "False", "None"):  # as some templates show earlier calls
        literal = "null" if literal == "None" else literal.lower()
    try:
        value = from_json(literal, allow_inf_nan=False)
    except ValueError:  # also for half of a surrogate pair, and if nested too deeply
        return quoted(text)
    is_number = "number" in types and type(value) is int
    is_integer = "integer" in types and type(value) is float and value.is_integer()
    is_allowed = _TYPES[type(value)] in types and not isinstance(value, str)
    return literal if is_allowed or is_number or is_integer else quoted(text)


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
