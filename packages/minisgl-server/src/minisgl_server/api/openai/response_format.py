"""Structured output of a request: OpenAI's response_format, vLLM's structured_outputs and SGLang's fields."""

from collections.abc import Mapping
from typing import Any

from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import InvalidValueError
from minisgl_server.api.openai.schemas import GenerationRequest, ResponseFormat

_WHITESPACE = ("whitespace_pattern", "disable_any_whitespace")
"""Fields of `StructuredOutputs` that go with any other field that asks for JSON."""
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "whitespace_pattern": "whitespace_pattern",
    "guided_whitespace_pattern": "whitespace_pattern",
    "disable_any_whitespace": "disable_any_whitespace",
}
"""Deprecated fields of vLLM and fields of SGLang, with their names in `StructuredOutputs`."""


def requested_structured_outputs(request: GenerationRequest) -> tuple[StructuredOutputs | None, str]:
    """Return the structured output that a request asks for, and the name of the field that asks for it."""
    requested = {} if request.response_format is None else _from_response_format(request.response_format)
    if request.structured_outputs is not None:
        inside = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        options = {f"structured_outputs.{name}": {name: inside.pop(name)} for name in _WHITESPACE if name in inside}
        name = f"structured_outputs.{next(iter(inside))}" if len(inside) == 1 else "structured_outputs"
        requested |= {**options, name: inside}
    return single_structured_output(requested | structured_fields(dict(request)))


def structured_fields(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields in `_FIELDS` of a request with these values, as `single_structured_output` takes them."""
    return {name: {field: values[name]} for name, field in _FIELDS.items() if values.get(name) is not None}


def single_structured_output(requested: dict[str, dict[str, Any]]) -> tuple[StructuredOutputs | None, str]:
    """Return the one structured output of a request, and the name of its field. None and "" if there is none.

    `requested` has the arguments of `StructuredOutputs` by the name of the request's field.
    """
    arguments: dict[str, Any] = {}
    fields: dict[str, str] = {}
    """Field of the request for each argument in `_WHITESPACE`, and that of the structured output."""
    for name, given in requested.items():
        kind = next((each for each in given if each in _WHITESPACE), "output")
        if (first := fields.setdefault(kind, name)) != name:
            raise InvalidValueError(name, next(iter(given.values()), None), f"left out if {first} is given")
        arguments |= given
    if not fields:
        return None, ""
    if "output" not in fields:
        kind, name = next(iter(fields.items()))
        raise InvalidValueError(name, arguments[kind], "left out unless the output must be JSON")
    try:
        return StructuredOutputs(**arguments), fields["output"]
    except InvalidValueError as error:
        name = fields.get(error.name.removeprefix("structured_outputs."), fields["output"])
        raise InvalidValueError(name, error.value, error.allowed) from None


def _from_response_format(response_format: ResponseFormat) -> dict[str, dict[str, Any]]:
    for name in ("json_schema", "structures", "triggers"):
        required_type = "json_schema" if name == "json_schema" else "structural_tag"
        if (response_format.type == required_type) != (getattr(response_format, name) is not None):
            allowed = f"given beside the type {required_type}, and only there"
            raise InvalidValueError(f"response_format.{name}", getattr(response_format, name), allowed)
    if response_format.json_schema is not None:
        return {"response_format.json_schema.schema": {"json": response_format.json_schema.schema_}}
    if response_format.type == "structural_tag":
        tag = response_format.model_dump(include={"structures", "triggers"}, by_alias=True)
        return {"response_format": {"structural_tag": tag}}
    return {"response_format": {"json_object": True}} if response_format.type == "json_object" else {}
