"""Base class of the request models, and types of their fields. Names and sizes are checked before types."""

from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import tagged_union_schema

from minisgl_core.errors import context_length_message
from minisgl_core.utils.suggestions import did_you_mean
from minisgl_server.api.limits import Bound, RequestLimits

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Integer that the IPC messages can encode."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31, strict=False)]
"""Token id as the key of a JSON object, which is a string."""


def _validate_keys(biases: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    validated = handler(biases)
    # A request of the Responses API is validated twice: the second time, its keys are numbers.
    if isinstance(biases, dict) and (others := {*map(str, biases)}.difference(map(str, validated))):
        text = f"Input should have plain token ids as keys, such as 5, unlike {min(others)[:20]!r}"
        raise PydanticCustomError("other_spelling", text)
    return validated


TokenBiases = Annotated[dict[TokenKey, float] | None, WrapValidator(_validate_keys)]
"""Bias of each token id. Other spellings, such as 05, are refused: of two keys that are the same number, only one would count."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""Metadata of a request, with OpenAI's limits. Responses repeat it."""
_Loc = tuple[int | str, ...]
_MAX_HINTED_NAME = 40
"""Characters of an unknown field's name that are compared with the names of fields; longer ones would take long."""


def _fail_fast(schema: Any) -> None:
    """Set ``fail_fast`` in a core schema and all schemas inside."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for each in schema.values():
            _fail_fast(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            _fail_fast(each)


class StrictModel(BaseModel):
    """Model that refuses unknown fields unless they are null, and does not convert between types.

    With `RequestLimits` as validation context, it also refuses texts, lists and objects that are too large, before it
    validates their contents. Lists and objects are validated up to their first error.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema, with every list and object stopping at its first error."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any, info: ValidationInfo) -> Any:
        """Check names and sizes, and drop unknown fields that are null."""
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
                hint = did_you_mean(name[:_MAX_HINTED_NAME], bounds)
                raise _error((name,), PydanticCustomError("extra_forbidden", "not a field", {"hint": hint}))
        return known


class Caller(StrictModel):
    """Caller of a tool, which clients copy from responses of OpenAI or Anthropic: the model itself."""

    type: Literal["direct"]


@cache
def _bounds(model: type[BaseModel]) -> dict[str, Bound]:
    """Return the bound of each field, by its name in requests."""
    return {
        field.alias or name: next((each for each in field.metadata if isinstance(each, Bound)), Bound.ENTRIES)
        for name, field in model.model_fields.items()
    }


def _check_size(loc: _Loc, value: str | list[Any] | dict[str, Any], bound: Bound, limits: RequestLimits) -> None:
    """Raise if a text, list or object is too large, or a list contains such a value."""
    if isinstance(value, str):
        if len(value) > limits.max_chars:
            what = f"there are {len(value)} characters, and no more than {limits.max_chars} fit"
            raise _beyond_context(loc, what, limits)
        return
    is_prompts = bound is Bound.OUTPUTS  # only prompts have this bound
    if is_prompts and isinstance(value, list) and value and isinstance(value[0], int):
        bound = Bound.CONTEXT  # one prompt, in tokens
    if len(value) > (most := limits.max_entries[bound]):
        if bound is Bound.CONTEXT:
            raise _beyond_context(loc, f"there are {len(value)} entries", limits)
        why = f"there are {len(value)} entries, and at most {most} are allowed ({bound.value})"
        raise _error(loc, PydanticCustomError("too_large", why))
    if isinstance(value, list):
        inner = Bound.CONTEXT if is_prompts else Bound.ENTRIES
        for index, each in enumerate(value):
            if isinstance(each, str | list):
                _check_size((*loc, index), each, inner, limits)


def _beyond_context(loc: _Loc, what: str, limits: RequestLimits) -> ValidationError:
    message = context_length_message(limits.max_entries[Bound.CONTEXT], what).removesuffix(".")
    return _error(loc, PydanticCustomError("beyond_context", message))


def _error(loc: _Loc, kind: PydanticCustomError) -> ValidationError:
    """Return an error that pydantic reports at this location, and that holds no copy of the input."""
    return ValidationError.from_exception_data("request", [InitErrorDetails(type=kind, loc=loc, input=None)])


class ByType:
    """Validates a value of a union of models as the one with its ``type``, as in ``Annotated[Text | Image, ByType()]``.

    A value without a type is of the model whose type may be null, if there is one. pydantic adds a tag to the location of an
    error. Since the tags ``<TYPE>`` are no identifiers, `errors.invalid_fields` does not take them for fields, as it would take
    those of ``Field(discriminator="type")``.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        default, schemas = None, dict[str, CoreSchema]()
        for model in get_args(source):
            annotation = model.model_fields["type"].annotation
            allows_none = NoneType in get_args(annotation)
            kinds = get_args(get_args(annotation)[0] if allows_none else annotation)
            if len(kinds) != 1:
                raise TypeError(f"the type of {model.__name__} must be one literal, or that or None, not {annotation}")
            schemas[kinds[0]] = handler.generate_schema(model)
            default = kinds[0] if allows_none else default

        def tag(value: Any) -> str | None:
            kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            kind = default if kind is None else kind
            return f"<{kind}>" if isinstance(kind, str) else None

        tagged = {f"<{kind}>": schema for kind, schema in schemas.items()}
        allowed = f"Input should be an object with the type {' or '.join(schemas)}"
        return tagged_union_schema(tagged, tag, custom_error_type="type_not_supported", custom_error_message=allowed)
