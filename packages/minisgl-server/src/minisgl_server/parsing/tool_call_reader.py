"""Reads one tool call, a JSON object with a name and arguments, while the model writes it.

Text is read character by character, so that the result does not depend on how it is split into pieces.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from pydantic_core import from_json

_NAME = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
"""Start of a tool call up to its arguments, in the order that models are trained to write."""


class JsonScanner:
    """Follows the strings of a JSON text, and the `depth` of its open brackets."""

    def __init__(self) -> None:
        """Start before the first character."""
        self.depth = 0
        self.in_string = self._is_escaped = False

    def push(self, char: str) -> None:
        """Add one character."""
        if self.in_string:
            self.in_string = char != '"' or self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class ToolCallReader:
    """Reads one tool call. Once the name is known, arguments are passed on as they come.

    Attributes:
        name: name of the function; None until the text is known to be a call.
        in_arguments: the arguments have begun and not ended.
        state: ``open``, ``complete``, ``truncated`` (the JSON breaks off at a "<") or ``text`` (not a call).
    """

    def __init__(
        self,
        known: Collection[str] | None,
        prefixes: Mapping[str, Collection[str]],
        begin: Callable[[str], None],
        emit: Callable[[str], None],
    ) -> None:
        """Start a call of one of the functions `known`, or of any if it is None.

        Args:
            prefixes: allowed texts before the arguments, by function; other functions may have any.
            begin: called with the name, once it is known.
            emit: called with pieces of the arguments.
        """
        self._known, self._prefixes, self._begin, self._emit = known, prefixes, begin, emit
        self._scanner = JsonScanner()
        self._chars: list[str] = []
        self._is_nested = False
        """True after the first bracket inside the object. A name that comes later is only found at the end."""
        self.name: str | None = None
        self.in_arguments = False
        self.state: Literal["open", "complete", "truncated", "text"] = "open"

    def push(self, char: str) -> None:
        """Add one character; only while the state is ``open``."""
        if char == "<" and not self._scanner.in_string:
            self.state = "truncated" if self.name is not None else "text"
            return
        if self._scanner.depth == 0 and not char.isspace() and char != "{":
            self.state = "text"
        self._scanner.push(char)
        if self.name is None and self._scanner.depth == 2 and not self._is_nested:
            self._is_nested = True  # this bracket begins the arguments, if the keys have the usual order
            self._look_for_name(self.raw, char)
        elif self.in_arguments:
            self._emit(char)
            self.in_arguments = self._scanner.depth > 1
        if self.name is None:
            self._chars.append(char)
        if char in "}]" and self._scanner.depth == 0 and self.state == "open":
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
                self._begin(name)
                self._emit(char)

    def _is_reordered_call(self) -> bool:
        """Return True if the complete object is a call whose keys have another order than usual."""
        call = _loads(self.raw)
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters"))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not self._is_allowed(name, "") or not isinstance(_loads(text), dict):
            return False
        self.name = name
        self._begin(name)
        self._emit(text)
        return True

    def _is_allowed(self, name: str, prefix: str) -> bool:
        """Return True if this text before the arguments may begin a call of the function."""
        is_known = self._known is None or name in self._known
        return is_known and (name not in self._prefixes or prefix.lstrip() in self._prefixes[name])


def _loads(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid, has half of a surrogate pair, or is nested too deeply."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
