"""Converts the text of an argument to JSON, as the JSON schema of a function's parameters asks."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic_core import from_json

STRING, OBJECT = frozenset({"string"}), frozenset({"object"})
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
"""Maximum number of schemas to follow for one argument; those beyond allow any type. A client may send schemas in cycles."""
_MAX_VALUES = 1024
"""Maximum number of values to inspect of the enumerations for one argument, and of characters of a reference."""
_MAX_SEGMENTS = 16
"""Maximum number of names in a reference."""
_ENCODER = json.JSONEncoder(ensure_ascii=False)
"""Encoder of strings. `json.dumps` would make one per call, and a streamed string has a call per character."""


def argument_types(parameters: Any, name: str) -> frozenset[str]:
    """Return the JSON types that the schema of a function's parameters allows for an argument; all if it does not tell."""
    left, num_values = iter(range(_MAX_SCHEMAS)), 0

    def followed(schema: Any, types_of: Callable[[Mapping[str, Any]], frozenset[str]]) -> frozenset[str]:
        """Return the types that a schema and those it refers to allow together; `types_of` returns those of each alone."""
        if next(left, None) is None or not isinstance(schema, Mapping):
            return _ANY
        types = types_of(schema)
        if isinstance(reference := schema.get("$ref"), str):
            types &= followed(resolve_reference(parameters, reference), types_of)
        if isinstance(schemas := schema.get("allOf"), list):
            types = types.intersection(*(followed(each, types_of) for each in schemas[:_MAX_SCHEMAS]))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schemas := schema.get(keyword), list) and 0 < len(schemas) <= _MAX_SCHEMAS:
                types &= frozenset().union(*(followed(each, types_of) for each in schemas))
        return types

    def argument(schema: Mapping[str, Any]) -> frozenset[str]:
        properties = schema.get("properties")
        found = properties.get(name) if isinstance(properties, Mapping) else None
        return followed(schema.get("additionalProperties") if found is None else found, inspected)

    def inspected(schema: Mapping[str, Any]) -> frozenset[str]:
        nonlocal num_values
        values = schema.get("enum")
        num_values += len(values) if isinstance(values, list) else 0
        return own_types(schema if num_values <= _MAX_VALUES else {"type": schema.get("type")})

    return followed(parameters, argument)


def resolve_reference(root: Any, reference: str) -> Any:
    """Return the schema of a reference such as ``#/$defs/unit``, or None."""
    if len(reference) > _MAX_VALUES:
        return None
    found = root
    for name in reference.removeprefix("#").split("/", _MAX_SEGMENTS)[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the keywords ``type``, ``enum`` and ``const`` of a schema allow."""
    allowed, types = _ANY, schema.get("type")
    if isinstance(types := [types] if isinstance(types, str) else types, list):
        allowed &= _with_integers(each for each in types[:_MAX_SCHEMAS] if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and len(values) <= _MAX_VALUES:
        allowed &= _with_integers(_TYPES[type(value)] for value in values)
    return allowed


def _with_integers(types: Iterable[str]) -> frozenset[str]:
    """Return types as a set. Integers are numbers, too."""
    found = frozenset(types)
    return found | {"integer"} if "number" in found else found


def to_json(text: str, types: frozenset[str]) -> str:
    """Return an argument as JSON: as it is if it is JSON of one of the types, and else as a string."""
    literal = text.strip()
    if "string" not in types and literal in ("True", "False", "None"):  # as some templates show earlier calls
        literal = "null" if literal == "None" else literal.lower()
    try:
        value = from_json(literal, allow_inf_nan=False)
    except ValueError:  # also for half of a surrogate pair, and if nested too deeply
        return quoted(text)
    is_integer = "integer" in types and type(value) is float and value.is_integer()
    is_allowed = _TYPES[type(value)] in types and not isinstance(value, str)
    return literal if is_allowed or is_integer else quoted(text)


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return _ENCODER.encode(text)
