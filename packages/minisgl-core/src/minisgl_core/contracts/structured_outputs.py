"""Structured outputs: the grammars that a request can ask for."""

import json as json_module
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from minisgl_core.contracts.grammar import WHITESPACE, GrammarKind, check_grammar_size
from minisgl_core.errors import InvalidValueError, Summary

_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}

_FIELD_TYPES: dict[str, tuple[Any, str]] = {
    "json_object": (bool, "true or false"),
    "regex": (str | None, "a string"),
    "grammar": (str | None, "a string"),
    "whitespace_pattern": (str | None, "a string"),
    "disable_any_whitespace": (bool | None, "true or false"),
}
"""Types of `StructuredOutputs`' fields, and their description in errors. The other fields have checks of their own."""

_ANY_WHITESPACE = r"[ ]|\n[ ]{0,24}"
"""A space, or a new line with indentation. Models that may write any whitespace sometimes write it without end."""

MAX_CHOICES = 10_000
"""Maximum number of texts of a choice, which bounds the time to check them."""
MAX_STRUCTURES = 512
"""Maximum number of structures, and of triggers, of a structural tag. Each structure is compared with each trigger."""


class TaggedStructure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON value between a begin text and an end text."""

    begin: str
    schema: bool | dict[str, Any]
    end: str


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Free text with structures after triggers; see `minisgl_core.contracts.grammar.GrammarKind`.

    Attributes:
        structures: structures that may follow a trigger; `begin` includes the trigger.
        triggers: non-empty texts, each the beginning of a structure. If one trigger begins with another, the shorter one
            applies.
    """

    structures: list[TaggedStructure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"

    @classmethod
    def read(cls, text: str) -> "StructuralTag":
        """Return the structural tag of a JSON text.

        Raises:
            ValueError: the text is not JSON, or not such an object.
        """
        try:
            tag = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ValueError(str(error)) from None
        if max(len(tag.structures), len(tag.triggers)) > MAX_STRUCTURES:
            raise ValueError(f"there are more than {MAX_STRUCTURES} structures or triggers")
        if not tag.structures or not all(tag.triggers):
            raise ValueError("there must be structures, and no trigger may be empty")
        for each in tag.structures:
            tag.trigger_of(each)
        for trigger in tag.triggers:
            if not any(each.begin.startswith(trigger) for each in tag.structures):
                raise ValueError(f"no structure begins with the trigger {trigger!r}")
        return tag

    def trigger_of(self, structure: TaggedStructure) -> str:
        """Return the trigger of one of the structures.

        Raises:
            ValueError: the structure begins with no trigger.
        """
        triggers = [trigger for trigger in self.triggers if structure.begin.startswith(trigger)]
        if not triggers:
            raise ValueError(f"{structure.begin!r} does not begin with a trigger")
        return min(triggers, key=len)


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to compile.

    Attributes:
        kind, text: see `minisgl_core.contracts.grammar.GrammarKind`.
        name: the user's name for the text, for errors.
        reasoning_end_token: token that ends the reasoning content. The output is unrestricted up to this token; None if the
            grammar applies from the beginning.
        reasoning_begin_token: token that starts the reasoning content. If the output does not begin with it, the grammar
            applies from the beginning; None if the output always begins in the reasoning content.
        parts: the user's name and the schema of each part of `text`. These are checked first, so that an error names the
            part at fault.
    """

    kind: GrammarKind
    text: str
    name: str
    reasoning_end_token: int | None = None
    reasoning_begin_token: int | None = None
    parts: tuple[tuple[str, str], ...] = ()

    def check_size(self) -> None:
        """Check that no text is longer than `MAX_GRAMMAR_BYTES` allows.

        Raises:
            InvalidValueError: the text or one of its parts is longer.
        """
        for name, schema in self.parts:
            check_grammar_size("json_schema", schema, name)
        check_grammar_size(self.kind, self.text, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Grammar that the output of a request must follow. Exactly one of the first six fields is set. Names are vLLM's.

    JSON is compact: one space may follow a comma or a colon. The last two fields change that for ``json`` and
    ``json_object``.

    Attributes:
        json: JSON schema of the output, as a dictionary or text.
        regex: pattern that the whole output matches.
        choice: texts of which the output is one.
        grammar: context-free grammar of the output, in Lark's notation with the start rule ``start``, or in EBNF (``::=``)
            with the start rule ``root``.
        json_object: True if the output is any JSON object.
        structural_tag: free text with structures after triggers, as a dictionary or text; see `GrammarKind`.
        whitespace_pattern: pattern of the whitespace between JSON tokens.
        disable_any_whitespace: True for no whitespace between JSON tokens; False for a space or an indented new line
            anywhere between them.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    def __post_init__(self) -> None:
        for name, (kind, allowed) in _FIELD_TYPES.items():
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidValueError(f"structured_outputs.{name}", value, allowed)
        given = self._given_fields()
        if len(given) != 1:
            allowed = f"exactly one of {', '.join(_KINDS)}"
            raise InvalidValueError("structured_outputs", Summary(", ".join(given)) or None, allowed)
        for name in ("json", "structural_tag"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _json_text(value, f"structured_outputs.{name}"))
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))
        for name in ("json", "structural_tag", "regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                check_grammar_size(_KINDS[name], text, f"structured_outputs.{name}")
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if (value := getattr(self, name)) is not None and self.json is None and not self.json_object:
                raise InvalidValueError(f"structured_outputs.{name}", value, "left out without json or json_object")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            allowed = "left out if disable_any_whitespace is true"
            raise InvalidValueError("structured_outputs.whitespace_pattern", self.whitespace_pattern, allowed)

    def source(self, name: str = "") -> GrammarSource:
        """Return the grammar to compile; errors refer to it by `name`."""
        [field] = self._given_fields()
        name, value = name or f"structured_outputs.{field}", getattr(self, field)
        whitespace = self._whitespace
        if whitespace is not None:
            schema = _schema(value, name) if field == "json" else {"type": "object"}
            return GrammarSource("json_schema", json_module.dumps(schema | {WHITESPACE: whitespace}), name)
        text = json_module.dumps(value) if field == "choice" else "" if field == "json_object" else value
        return GrammarSource(_KINDS[field], text, name)

    def _given_fields(self) -> list[str]:
        """Return the names of the fields with a grammar; only one after construction."""
        values = {name: getattr(self, name) for name in _KINDS} | {"json_object": self.json_object or None}
        return [name for name, value in values.items() if value is not None]

    @property
    def _whitespace(self) -> str | None:
        """Value of `WHITESPACE`; None for the default."""
        if self.whitespace_pattern is not None:
            return self.whitespace_pattern
        if self.disable_any_whitespace is None:
            return None
        return "" if self.disable_any_whitespace else _ANY_WHITESPACE


def _schema(text: str, name: str) -> dict[str, Any]:
    try:
        schema = json_module.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(name, text, f"a JSON schema ({error})") from None
    return schema if isinstance(schema, dict) else {"allOf": [schema]}


def _json_text(value: Any, name: str) -> str:
    if not isinstance(value, str | dict):
        raise InvalidValueError(name, value, "a JSON object, as a dictionary or a string")
    if isinstance(value, str):
        return value
    try:
        return json_module.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(name, value, f"a JSON object ({error})") from None


def _texts(choice: Any) -> tuple[str, ...]:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
    if not is_list or not choice or not all(isinstance(each, str) for each in choice):
        raise InvalidValueError("structured_outputs.choice", choice, "a list of one or more strings")
    if len(choice) > MAX_CHOICES:
        raise InvalidValueError(
            "structured_outputs.choice", Summary(f"{len(choice)} strings"), f"at most {MAX_CHOICES} strings"
        )
    return tuple(choice)
