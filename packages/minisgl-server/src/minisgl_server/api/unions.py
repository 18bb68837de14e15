"""Unions of models that their field `type` tells apart."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, Discriminator


def by_type(*models: type[BaseModel], default: type[BaseModel] | None = None) -> Discriminator:
    """Return the discriminator of a union whose members are tagged with their class names.

    pydantic's own discriminator puts the type into the place of an error, where it reads as a field.

    Args:
        models: members of the union; each has a field ``type`` with one value.
        default: the member that a missing type stands for.
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
    """Return the one value that a model's type may have."""
    values = [model.model_fields["type"].annotation]
    while not isinstance(values[0], str):
        values = list(get_args(values[0]))
    return values[0]
