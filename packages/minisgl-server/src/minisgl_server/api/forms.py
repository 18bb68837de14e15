"""The form that a request asks of its output: OpenAI's response_format, vLLM's structured_outputs and older guided_ fields."""

from __future__ import annotations

from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.structured_outputs import StructuredOutputs
from minisgl_server.api.schemas import GenerationRequest

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def form_of(request: GenerationRequest) -> tuple[StructuredOutputs | None, str]:
    """What the output must be, and the name of the field that says so.

    Raises:
        InvalidValueError: two fields do, or one says it wrongly.
    """
    forms: dict[str, dict[str, Any]] = {}
    wanted = request.response_format
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        allowed = "given beside the type json_schema, and only there"
        raise InvalidValueError("response_format.json_schema", wanted.json_schema, allowed)
    if wanted is not None and wanted.json_schema is not None:
        forms["response_format.json_schema.schema"] = {"json": wanted.json_schema.schema_}
    elif wanted is not None and wanted.type == "json_object":
        forms["response_format"] = {"json_object": True}
    if request.structured_outputs is not None:
        given = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        forms[f"structured_outputs.{next(iter(given))}" if len(given) == 1 else "structured_outputs"] = given
    forms |= {name: {field: value} for name, field in _GUIDED.items() if (value := getattr(request, name)) is not None}
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise InvalidValueError(second, "given", f"left out where {first} is given")
    for name, form in forms.items():
        try:
            return StructuredOutputs(**form), name
        except InvalidValueError as error:
            raise InvalidValueError(name, error.value, error.allowed) from None
    return None, ""
