"""Discriminated unions of models by their field ``type``."""

from typing import Any

from pydantic import Discriminator


def type_discriminator(*types: str, default: str | None = None) -> Discriminator:
    """Return the discriminator of a union whose members have the tags ``<TYPE>``.

    pydantic adds the tag to the location of an error. Since it is no identifier, `errors.invalid_fields` does not take it for a
    field, as it would take the tags of ``Field(discriminator="type")``.

    Args:
        types: values of ``type``, one per member.
        default: type of a value without one.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = default if kind is None else kind
        return f"<{kind}>" if isinstance(kind, str) else None

    allowed = f"Input should be an object with the type {' or '.join(types)}"
    return Discriminator(tag, custom_error_type="type_not_supported", custom_error_message=allowed)
