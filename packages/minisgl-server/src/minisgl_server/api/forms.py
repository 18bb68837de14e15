"""The form that a request asks of its output: OpenAI's response_format, vLLM's structured_outputs and SGLang's fields."""

from __future__ import annotations

from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.structured_outputs import StructuredOutputs
from minisgl_server.api.schemas import GenerationRequest, ResponseFormat

_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""vLLM's older fields and SGLang's, and what `StructuredOutputs` calls them."""


_WHITESPACE = {
    "structured_outputs.whitespace_pattern": "whitespace_pattern",
    "structured_outputs.disable_any_whitespace": "disable_any_whitespace",
    "whitespace_pattern": "whitespace_pattern",
    "guided_whitespace_pattern": "whitespace_pattern",
    "disable_any_whitespace": "disable_any_whitespace",
}
"""Fields about the whitespace in JSON, whichever field asks for it."""


def form_of(request: GenerationRequest) -> tuple[StructuredOutputs | None, str]:
    """What the output must be, and the name of the field that says so.

    Raises:
        InvalidValueError: two fields do, or one says it wrongly.
    """
    forms = {} if request.response_format is None else _of_response_format(request.response_format)
    given = {name: getattr(request, name) for name in (*_FIELDS, *_WHITESPACE) if name in type(request).model_fields}
    if request.structured_outputs is not None:
        inside = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            given[f"structured_outputs.{name}"] = inside.pop(name, None)
        forms[f"structured_outputs.{next(iter(inside))}" if len(inside) == 1 else "structured_outputs"] = inside
    given = {name: value for name, value in given.items() if value is not None}
    forms |= {name: {_FIELDS[name]: value} for name, value in given.items() if name in _FIELDS}
    return only_form(forms, {name: value for name, value in given.items() if name in _WHITESPACE})


def only_form(
    forms: dict[str, dict[str, Any]], whitespace: dict[str, Any] | None = None
) -> tuple[StructuredOutputs | None, str]:
    """Return the one form that was asked for, and the name of its field.

    Args:
        forms: fields of `StructuredOutputs` by the name of the request's field.
        whitespace: values of the request's fields in `_WHITESPACE`.

    Raises:
        InvalidValueError: there are two, or it is wrong.
    """
    names: dict[str, str] = {}
    for name in whitespace or {}:
        if (first := names.setdefault(_WHITESPACE[name], name)) != name:
            raise InvalidValueError(name, "given", f"left out where {first} is given")
    more = {field: (whitespace or {})[name] for field, name in names.items()}
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise InvalidValueError(second, "given", f"left out where {first} is given")
    for name, form in forms.items():
        try:
            return StructuredOutputs(**form, **more), name
        except InvalidValueError as error:
            of_whitespace = names.get(error.name.removeprefix("structured_outputs."))
            raise InvalidValueError(of_whitespace or name, error.value, error.allowed) from None
    for field, name in names.items():
        raise InvalidValueError(name, more[field], "left out unless the output must be JSON")
    return None, ""


def _of_response_format(wanted: ResponseFormat) -> dict[str, dict[str, Any]]:
    for name in ("json_schema", "structures", "triggers"):
        of_type = "json_schema" if name == "json_schema" else "structural_tag"
        if (wanted.type == of_type) != (getattr(wanted, name) is not None):
            allowed = f"given beside the type {of_type}, and only there"
            raise InvalidValueError(f"response_format.{name}", getattr(wanted, name), allowed)
    if wanted.json_schema is not None:
        return {"response_format.json_schema.schema": {"json": wanted.json_schema.schema_}}
    if wanted.type == "structural_tag":
        return {
            "response_format": {"structural_tag": wanted.model_dump(include={"structures", "triggers"}, by_alias=True)}
        }
    return {"response_format": {"json_object": True}} if wanted.type == "json_object" else {}
