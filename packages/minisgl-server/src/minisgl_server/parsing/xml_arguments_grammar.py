"""Grammar of arguments between tags, as in the formats of Qwen3-Coder and GLM: each value is a text or JSON.

It allows only what the parser reads back. The parser takes a value as JSON if it is JSON of a type that the schema allows, and
else as a string. So where a string is allowed besides other types, a text must not look like JSON that does not fit.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from minisgl_core.contracts.grammar import CallPart
from minisgl_server.parsing.argument_values import argument_types, own_types, quoted, resolve_reference, to_json
from minisgl_server.parsing.grammar_size import GrammarSize, UnsupportedSchemaError

ANY_TEXT = r"(.|\n)*"
MAX_PARAMETERS = 800
"""Maximum number of parameters of all functions of a request. llguidance has two items per optional one, and at most 2000."""
_MAX_ALTERNATIVES = 64
"""Maximum number of schemas to follow for one parameter."""
_MAX_VALUES = 2000
"""Maximum number of values of the enumerations of one parameter, which is also llguidance's limit."""
_SCALARS = {"null": "null", "boolean": "true|false", "integer": r"-?(0|[1-9]\d{0,15})"}
_SCALARS["number"] = rf"{_SCALARS['integer']}(\.\d{{1,16}})?"
"""Patterns of the JSON values that a parameter may have besides strings."""
_BRACKETS = {"array": "[", "object": "{"}
_KEYWORDS = {
    "$ref", "anyOf", "oneOf", "allOf", "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems", "maxItems", "properties",
    "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
}  # fmt: skip
"""Keywords that restrict values. The check of a grammar refuses schemas with others that do, but ``format``."""
_NOT_FOLLOWED = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties"}
"""Keywords by which parameters depend on each other or which concern several of them."""


def parameters_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return the parameters that the schema of all parameters names: name, schema, and True if it is required.

    Raises:
        UnsupportedSchemaError: the parameters depend on each other.
    """
    if found := _NOT_FOLLOWED & schema.keys():
        raise UnsupportedSchemaError(f"beside its parameters, the schema has {min(found)}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_list = isinstance(required, list) and all(isinstance(each, str) for each in required)
    if not isinstance(properties, Mapping) or not is_list:
        raise UnsupportedSchemaError("it is no JSON schema")
    other, is_required = schema.get("additionalProperties", True), dict.fromkeys(required, True)
    return [
        (key, each, key in is_required) for key, each in properties.items() if each is not False or key in is_required
    ] + [(key, other, True) for key in is_required if key not in properties]


def value_parts(
    root: Mapping[str, Any], key: str, schema: Any, ends: tuple[str, ...], size: GrammarSize
) -> list[CallPart]:
    """Return the parts of a parameter's value and its end, the first of the texts that the parser takes as one.

    Args:
        root: schema of all parameters.
        key: name of the parameter.
        schema: schema of the parameter.
        ends: texts that end a value.
        size: size of the grammar of the request so far.

    Raises:
        UnsupportedSchemaError: the grammar cannot enforce the schema, or is too large.
    """
    types = argument_types(root, key)
    if "string" not in types:
        value: list[CallPart] = [{"schema": _with_definitions(schema, root)}, ends[0]]
        size.add(value)
        return value
    leaves = list(_leaves(schema, root, iter(range(_MAX_ALTERNATIVES))))
    found: dict[str, list[CallPart]] = {}
    num_values = 0
    try:
        for leaf in leaves:
            for parts in _alternatives(leaf, root, types, ends, size):
                found.setdefault(size.add(parts), parts)
                if (num_values := num_values + 1) > _MAX_VALUES:
                    raise UnsupportedSchemaError(f"a parameter has more than {_MAX_VALUES} values")
    except (TypeError, ValueError) as error:
        raise UnsupportedSchemaError(f"a keyword of a parameter has a wrong value: {error}") from None
    _check_mixed(leaves, types)
    alternatives = list(found.values())
    if not alternatives:
        raise UnsupportedSchemaError("no value fits")
    return alternatives[0] if len(alternatives) == 1 else [{"any_of": alternatives}]


def _leaves(schema: Any, root: Mapping[str, Any], left: Iterator[int]) -> Iterator[Mapping[str, Any]]:
    """Return schemas without combinations, of which a value must fit one."""
    if next(left, None) is None:
        raise UnsupportedSchemaError(f"a parameter has more than {_MAX_ALTERNATIVES} alternatives")
    if schema is False:
        return
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        raise UnsupportedSchemaError("a parameter's schema is no object")
    match leaf := {name: schema[name] for name in sorted(_KEYWORDS & schema.keys())}:
        case {"anyOf": [*schemas]} | {"oneOf": [*schemas]} if len(leaf) == 1:
            for each in schemas:
                yield from _leaves(each, root, left)
        case {"allOf": [single]} if len(leaf) == 1:
            yield from _leaves(single, root, left)
        case {"$ref": str() as reference} if len(leaf) == 1:
            yield from _leaves(resolve_reference(root, reference), root, left)
        case {"$ref": _} | {"anyOf": _} | {"oneOf": _} | {"allOf": _}:
            raise UnsupportedSchemaError("a parameter that may be a string must fit several schemas at once")
        case _:
            yield leaf


def _alternatives(
    leaf: Mapping[str, Any], root: Mapping[str, Any], types: frozenset[str], ends: tuple[str, ...], size: GrammarSize
) -> Iterator[list[CallPart]]:
    """Return the parts of each alternative for one of the schemas of a value. `types` are those of all of them."""
    allowed = own_types(leaf)
    end, brackets = ends[0], [bracket for name, bracket in _BRACKETS.items() if name in types]
    if "enum" in leaf or "const" in leaf:
        if leaf.keys() - {"enum", "const", "type"}:
            raise UnsupportedSchemaError("a parameter has an enumeration and more conditions")
        for value in leaf["enum"] if "enum" in leaf else [leaf["const"]]:
            if not own_types({"const": value}) <= allowed:
                size.add("")  # it takes time, too
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if to_json(text, types) != (quoted(text) if isinstance(value, str) else text):
                raise UnsupportedSchemaError(f"{text!r} could be a string or not")
            if any(each in text for each in ends) or text.startswith(tuple(brackets)):
                raise UnsupportedSchemaError(f"{text!r} cannot be written as a value")
            yield [text + end]
        return
    if "string" in allowed:
        yield [{"patterns": [*_patterns(leaf), *_not_at_start(brackets)], "excludes": [*ends], "end": end}]
    for name in sorted(allowed & _SCALARS.keys() & _free_types(leaf)):
        yield [{"patterns": [_SCALARS[name]], "excludes": [], "end": end}]
    if brackets and (json_types := sorted(allowed & _BRACKETS.keys())):
        yield [{"schema": _with_definitions({**leaf, "type": json_types}, root)}, end]


def _check_mixed(leaves: list[Mapping[str, Any]], types: frozenset[str]) -> None:
    """Check that any text which the parser reads as null, a boolean or a number fits one of the schemas."""
    if all("string" not in own_types(leaf) or "enum" in leaf or "const" in leaf for leaf in leaves):
        return
    free = frozenset[str]().union(*map(_free_types, leaves))
    if mixed := sorted((types & _SCALARS.keys()) - free):
        raise UnsupportedSchemaError(f"a parameter may be a string or some values of the type {mixed[0]}")


def _free_types(leaf: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of null, booleans and numbers of which all values fit."""
    if leaf.keys() & {"enum", "const"}:
        return frozenset()
    is_limited = leaf.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    return own_types(leaf) & ({"null", "boolean"} if is_limited else _SCALARS.keys())


def _patterns(leaf: Mapping[str, Any]) -> list[str]:
    """Return patterns that a string of this schema matches as a whole."""
    patterns = []
    if isinstance(pattern := leaf.get("pattern"), str):
        is_escaped = (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 0
        has_end = pattern.endswith("$") and not is_escaped
        body = pattern.removeprefix("^").removesuffix("$" if has_end else "")
        before, after = "" if pattern.startswith("^") else ANY_TEXT, "" if has_end else ANY_TEXT
        patterns.append(f"{before}(?:{body}){after}")
    if "minLength" in leaf or "maxLength" in leaf:
        patterns.append(
            rf"(.|\n){{{int(leaf.get('minLength', 0))},{int(leaf['maxLength']) if 'maxLength' in leaf else ''}}}"
        )
    return patterns or [ANY_TEXT]


def _not_at_start(brackets: list[str]) -> list[str]:
    """Return a pattern of texts that do not start with a bracket after whitespace, as Python strips it."""
    space = r"\s\x1c-\x1f"
    return [rf"[{space}]*([^{space}\{chr(92).join(brackets)}]{ANY_TEXT})?"] if brackets else []


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema with the definitions that its references may name."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    if not definitions or not isinstance(schema, Mapping) or '"$ref"' not in json.dumps(schema):
        return schema
    return {**schema, **definitions}
