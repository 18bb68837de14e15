"""Base of the requests' models, and types of their fields. Names and sizes are checked before types."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from minisgl_core.errors import beyond_context
from minisgl_server.api.limits import Bound, RequestLimits

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What fits a message."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31, strict=False)]
"""Keys of JSON objects are texts."""
_Loc = tuple[int | str, ...]


def _fail_fast(schema: Any) -> None:
    """Set the option in a schema and in all that it holds."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for each in schema.values():
            _fail_fast(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            _fail_fast(each)


class Strict(BaseModel):
    """Refuses fields that it does not know, and text where a number belongs.

    With `RequestLimits` as context, it also refuses texts, lists and objects that are too large, before it looks into them.
    Lists and objects are validated up to their first error.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Have every list and object stop at its first error."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any, info: ValidationInfo) -> Any:
        """Check names and sizes, and leave out unknown fields that are null."""
        if not isinstance(data, dict):
            return data
        bounds = _bounds(cls)
        known = {}
        for name, value in data.items():
            if (bound := bounds.get(name)) is not None:
                if isinstance(value, str | list | dict) and isinstance(info.context, RequestLimits):
                    _check_size((name,), value, bound, info.context)
                known[name] = value
            elif value is not None:
                raise _error((name,), "extra_forbidden")
        return known


@cache
def _bounds(model: type[BaseModel]) -> dict[str, Bound]:
    """Bound of each field's lists and objects, by the name that requests have for it."""
    return {
        field.alias or name: next((each for each in field.metadata if isinstance(each, Bound)), Bound.ENTRIES)
        for name, field in model.model_fields.items()
    }


def _check_size(loc: _Loc, value: str | list[Any] | dict[str, Any], bound: Bound, limits: RequestLimits) -> None:
    """Refuse a text, list or object that is too large, or a list that holds one."""
    if isinstance(value, str):
        if len(value) > limits.text:
            raise _beyond_context(loc, f"there are {len(value)} characters, and no more than {limits.text} fit", limits)
        return
    is_prompts = bound is Bound.OUTPUTS
    if is_prompts and isinstance(value, list) and value and isinstance(value[0], int):
        bound = Bound.CONTEXT  # one prompt, in tokens
    if len(value) > (most := limits.counts[bound]):
        if bound is Bound.CONTEXT:
            raise _beyond_context(loc, f"there are {len(value)} entries", limits)
        why = f"there are {len(value)} entries, and at most {most} are allowed ({bound.value})"
        raise _error(loc, PydanticCustomError("too_large", why))
    if isinstance(value, list):
        inner = Bound.CONTEXT if is_prompts else Bound.ENTRIES
        for place, each in enumerate(value):
            if isinstance(each, str | list):
                _check_size((*loc, place), each, inner, limits)


def _beyond_context(loc: _Loc, what: str, limits: RequestLimits) -> ValidationError:
    message = beyond_context(limits.counts[Bound.CONTEXT], what).removesuffix(".")
    return _error(loc, PydanticCustomError("beyond_context", message))


def _error(loc: _Loc, kind: str | PydanticCustomError) -> ValidationError:
    """An error that pydantic takes over with its place, and without a copy of what is there."""
    return ValidationError.from_exception_data("request", [InitErrorDetails(type=kind, loc=loc, input=None)])
