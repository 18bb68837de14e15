"""Reads one tool call, a JSON object with a name and arguments, while the model writes it.

Text is read character by character, so that the result does not depend on how it is split into pieces.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

_NAME = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
"""Start of a tool call up to its arguments, in the order that models are trained to write."""


class JsonScanner:
    """Finds the end of a JSON object.

    Attributes:
        depth: number of open brackets.
        in_string: the next character belongs to a string.
        is_done: the object has ended.
        is_bad: the text does not begin with an opening brace.
    """

    __slots__ = ("_escaped", "depth", "in_string", "is_bad", "is_done")

    def __init__(self) -> None:
        self.depth, self.in_string, self.is_done, self.is_bad = 0, False, False, False
        self._escaped = False

    def push(self, char: str) -> None:
        """Add one character."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif self.depth == 0 and char != "{":
            self.is_bad = not char.isspace()
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            self.is_done = self.depth == 0
        elif char == '"':
            self.in_string = True


class ToolCallReader:
    """Reads one tool call. Once the name is known, arguments are passed on as they come.

    Attributes:
        name: name of the function; None until the text is known to be a call.
        state: ``open``, ``complete``, ``truncated`` (the JSON breaks off at a "<") or ``text`` (not a call).
    """

    def __init__(
        self, known: Collection[str] | None, prefixes: Mapping[str, Collection[str]], emit: Callable[[str], None]
    ) -> None:
        """Start a call.

        Args:
            known: function names that make a call; None for any name.
            prefixes: allowed texts before the arguments, by function; other functions may have any.
            emit: called with pieces of the arguments.
        """
        self._known, self._prefixes, self._emit = known, prefixes, emit
        self._scanner = JsonScanner()
        self.in_arguments = False
        """True if the arguments have begun and not ended."""
        self._chars: list[str] = []
        self._is_nested = False
        """True after the first bracket inside the object. A name that comes later is only found at the end."""
        self.name: str | None = None
        self.state: Literal["open", "complete", "truncated", "text"] = "open"

    def push(self, char: str) -> None:
        """Add one character; only while the state is ``open``."""
        scanner = self._scanner
        if char == "<" and not scanner.in_string:
            self.state = "truncated" if self.name is not None else "text"
            return
        scanner.push(char)
        if scanner.is_bad:
            self.state = "text"
        elif self.name is None and scanner.depth == 2 and not self._is_nested:
            self._is_nested = True
            self._look_for_name(self.raw, char)
        elif self.in_arguments:
            self._emit(char)
            self.in_arguments = scanner.depth > 1
        if self.name is None:
            self._chars.append(char)
        if scanner.is_done and self.state == "open":
            self.state = "complete" if self.name is not None or self._is_reordered_call() else "text"

    @property
    def raw(self) -> str:
        """Text so far. A call whose name is known keeps its text only up to its arguments."""
        return "".join(self._chars)

    def _look_for_name(self, before: str, char: str) -> None:
        if char == "{" and (match := _NAME.fullmatch(before)):
            name = _loads(match[1])
            if isinstance(name, str) and self._is_allowed(name, before):
                self.name, self.in_arguments = name, True
                self._emit(char)

    def _is_reordered_call(self) -> bool:
        """Return True if the complete object is a call whose keys have another order than usual."""
        call = _loads(self.raw)
        if (
            not isinstance(call, dict)
            or not isinstance(name := call.get("name"), str)
            or not self._is_allowed(name, "")
        ):
            return False
        arguments = call.get("arguments", call.get("parameters"))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not _is_encodable(text) or not isinstance(_loads(text), dict):
            return False
        self.name = name
        self._emit(text)
        return True

    def _is_allowed(self, name: str, prefix: str) -> bool:
        is_known = self._known is None or name in self._known
        return (
            is_known and _is_encodable(name) and (name not in self._prefixes or prefix.lstrip() in self._prefixes[name])
        )


def _is_encodable(text: str) -> bool:
    """Return True if text can be encoded; half of a surrogate pair, which JSON can escape, cannot."""
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def _loads(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid, also by NaN and Infinity, which Python accepts and writes."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
