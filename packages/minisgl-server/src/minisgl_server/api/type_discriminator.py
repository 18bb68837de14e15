"""Discriminated unions of models by their field ``type``."""

from typing import Any, get_args

from pydantic import BaseModel, Discriminator


def type_discriminator(*models: type[BaseModel], default: type[BaseModel] | None = None) -> Discriminator:
    """Return the discriminator of a union whose members are tagged with their class names.

    pydantic's own discriminator adds the type to the location of an error, where it looks like a field.

    Args:
        models: members of the union; the ``type`` of each has one value.
        default: member that a value without a type belongs to.
    """
    names = {_value(model): model.__name__ for model in models}

    def tag(value: Any) -> str | None:
        if isinstance(value, BaseModel):
            return type(value).__name__
        kind = value.get("type") if isinstance(value, dict) else None
        if kind is None and isinstance(value, dict) and default is not None:
            return default.__name__
        return names.get(kind) if isinstance(kind, str) else None

    allowed = f"Input should be an object with the type {' or '.join(names)}"
    return Discriminator(tag, custom_error_type="type_not_supported", custom_error_message=allowed)


def _value(model: type[BaseModel]) -> str:
    """Return the one allowed value of a model's ``type``."""
    values = [model.model_fields["type"].annotation]
    while not isinstance(values[0], str):
        values = list(get_args(values[0]))
    return values[0]
