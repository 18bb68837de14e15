"""What form an output must have."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from minisgl_core.contracts.grammar import GrammarKind
from minisgl_core.errors import InvalidValueError

_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to compile.

    Attributes:
        kind, text: see `minisgl_core.contracts.grammar.GrammarKind`.
        name: what the user calls the text, for errors.
        after_token: where not None, the output is free up to this token (the end of a model's thoughts).
    """

    kind: GrammarKind
    text: str
    name: str
    after_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the output of a request must be; exactly one field is set. Names are vLLM's.

    Attributes:
        json: fits this JSON schema, a dictionary or its text.
        regex: matches this pattern, as a whole.
        choice: is one of these texts.
        grammar: is a sentence of this context-free grammar, in Lark's notation, beginning at ``start``.
        json_object: is any JSON object.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            allowed = f"exactly one of {', '.join(_KINDS)}"
            raise InvalidValueError("structured_outputs", ", ".join(given), allowed)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))
        for name in ("regex", "grammar"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InvalidValueError(f"structured_outputs.{name}", value, "a text")

    def source(self, name: str = "") -> GrammarSource:
        """The grammar that this asks for; `name` is what errors call it."""
        [field] = [each for each in _KINDS if getattr(self, each) not in (None, False)]
        value = getattr(self, field)
        text = json_module.dumps(value) if field == "choice" else "" if field == "json_object" else value
        return GrammarSource(_KINDS[field], text, name or f"structured_outputs.{field}")


def _schema_text(schema: Any) -> str:
    if not isinstance(schema, str | dict):
        raise InvalidValueError("structured_outputs.json", schema, "a JSON schema, as a dictionary or as text")
    if isinstance(schema, str):
        return schema
    try:
        return json_module.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError("structured_outputs.json", schema, f"a JSON schema ({error})") from None


def _texts(choice: Any) -> tuple[str, ...]:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
    if not is_list or not choice or not all(isinstance(each, str) for each in choice):
        raise InvalidValueError("structured_outputs.choice", choice, "a list of one or more texts")
    return tuple(choice)
