"""Structured output of a request: OpenAI's response_format, vLLM's structured_outputs and SGLang's fields."""

from typing import Any

from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import InvalidValueError
from minisgl_server.api.openai.schemas import GenerationRequest, ResponseFormat

_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Deprecated fields of vLLM and fields of SGLang, with their names in `StructuredOutputs`."""


_WHITESPACE = {
    "structured_outputs.whitespace_pattern": "whitespace_pattern",
    "structured_outputs.disable_any_whitespace": "disable_any_whitespace",
    "whitespace_pattern": "whitespace_pattern",
    "guided_whitespace_pattern": "whitespace_pattern",
    "disable_any_whitespace": "disable_any_whitespace",
}
"""Fields about the whitespace of JSON, with their names in `StructuredOutputs`; they go with any field that asks for JSON."""


def requested_structured_outputs(request: GenerationRequest) -> tuple[StructuredOutputs | None, str]:
    """Return the structured output that a request asks for, and the name of the field that does."""
    requested = {} if request.response_format is None else _from_response_format(request.response_format)
    given = {name: getattr(request, name) for name in (*_FIELDS, *_WHITESPACE) if name in type(request).model_fields}
    if request.structured_outputs is not None:
        inside = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            given[f"structured_outputs.{name}"] = inside.pop(name, None)
        requested[f"structured_outputs.{next(iter(inside))}" if len(inside) == 1 else "structured_outputs"] = inside
    given = {name: value for name, value in given.items() if value is not None}
    requested |= {name: {_FIELDS[name]: value} for name, value in given.items() if name in _FIELDS}
    return single_structured_output(requested, {name: value for name, value in given.items() if name in _WHITESPACE})


def single_structured_output(
    requested: dict[str, dict[str, Any]], whitespace: dict[str, Any] | None = None
) -> tuple[StructuredOutputs | None, str]:
    """Return the one structured output of a request, and the name of its field. None and "" if there is none.

    Args:
        requested: arguments of `StructuredOutputs` by the name of the request's field.
        whitespace: values of the request's fields in `_WHITESPACE`.

    Raises:
        InvalidValueError: more than one is requested, or its value is invalid.
    """
    names: dict[str, str] = {}
    for name in whitespace or {}:
        if (first := names.setdefault(_WHITESPACE[name], name)) != name:
            raise InvalidValueError(name, "given", f"left out if {first} is given")
    whitespace_options = {field: (whitespace or {})[name] for field, name in names.items()}
    if len(requested) > 1:
        first, second = list(requested)[:2]
        raise InvalidValueError(second, "given", f"left out if {first} is given")
    if not requested:
        for field, name in names.items():
            raise InvalidValueError(name, whitespace_options[field], "left out unless the output must be JSON")
        return None, ""
    [(name, arguments)] = requested.items()
    try:
        return StructuredOutputs(**arguments, **whitespace_options), name
    except InvalidValueError as error:
        whitespace_field = names.get(error.name.removeprefix("structured_outputs."))
        raise InvalidValueError(whitespace_field or name, error.value, error.allowed) from None


def _from_response_format(response_format: ResponseFormat) -> dict[str, dict[str, Any]]:
    for name in ("json_schema", "structures", "triggers"):
        required_type = "json_schema" if name == "json_schema" else "structural_tag"
        if (response_format.type == required_type) != (getattr(response_format, name) is not None):
            allowed = f"given beside the type {required_type}, and only there"
            raise InvalidValueError(f"response_format.{name}", getattr(response_format, name), allowed)
    if response_format.json_schema is not None:
        return {"response_format.json_schema.schema": {"json": response_format.json_schema.schema_}}
    if response_format.type == "structural_tag":
        return {
            "response_format": {
                "structural_tag": response_format.model_dump(include={"structures", "triggers"}, by_alias=True)
            }
        }
    return {"response_format": {"json_object": True}} if response_format.type == "json_object" else {}
