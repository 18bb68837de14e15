"""The form that a request asks of its output: OpenAI's response_format, vLLM's structured_outputs and older guided_ fields."""

from __future__ import annotations

from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.structured_outputs import StructuredOutputs
from minisgl_server.api.schemas import GenerationRequest, ResponseFormat

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def form_of(request: GenerationRequest) -> tuple[StructuredOutputs | None, str]:
    """What the output must be, and the name of the field that says so.

    Raises:
        InvalidValueError: two fields do, or one says it wrongly.
    """
    forms = {} if request.response_format is None else _of_response_format(request.response_format)
    if request.structured_outputs is not None:
        given = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        forms[f"structured_outputs.{next(iter(given))}" if len(given) == 1 else "structured_outputs"] = given
    forms |= {name: {field: value} for name, field in _GUIDED.items() if (value := getattr(request, name)) is not None}
    return only_form(forms)


def only_form(forms: dict[str, dict[str, Any]]) -> tuple[StructuredOutputs | None, str]:
    """The one form that was asked for, as fields of `StructuredOutputs` by the name of the request's field; and that name.

    Raises:
        InvalidValueError: there are two, or it is wrong.
    """
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise InvalidValueError(second, "given", f"left out where {first} is given")
    for name, form in forms.items():
        try:
            return StructuredOutputs(**form), name
        except InvalidValueError as error:
            raise InvalidValueError(name, error.value, error.allowed) from None
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
