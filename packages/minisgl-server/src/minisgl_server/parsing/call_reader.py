"""Reading one tool call, a JSON object of a name and arguments, while it is being written.

Everything here goes character by character, so that what comes out never depends on how the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

_NAME = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
"""Up to the arguments, as models are taught to write it."""


class JsonScanner:
    """Finds the end of a JSON object.

    Attributes:
        depth: brackets that are open.
        in_string: whether the next character is part of a text.
        is_done: the object has ended.
        is_bad: it does not begin with a bracket.
    """

    __slots__ = ("_escaped", "depth", "in_string", "is_bad", "is_done")

    def __init__(self) -> None:
        self.depth, self.in_string, self.is_done, self.is_bad = 0, False, False, False
        self._escaped = False

    def push(self, char: str) -> None:
        """Take one character."""
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


class CallReader:
    """One call. Arguments are passed on as they come, once the name before them is known.

    Attributes:
        raw: all of it so far.
        name: of the function; None until it is known to be a call.
        state: ``open``, ``called`` (a call, complete), ``cut`` (a call whose JSON breaks off at a "<") or ``text`` (no call).
    """

    def __init__(
        self, known: Collection[str] | None, heads: Mapping[str, Collection[str]], emit: Callable[[str], None]
    ) -> None:
        """Begin.

        Args:
            known: names of functions, where no other name makes a call.
            heads: for some functions, all that a call may begin with, up to its arguments.
            emit: takes pieces of the arguments.
        """
        self._known, self._heads, self._emit = known, heads, emit
        self._scanner = JsonScanner()
        self._in_arguments = False
        self.raw = ""
        self.name: str | None = None
        self.state: Literal["open", "called", "cut", "text"] = "open"

    def push(self, char: str) -> None:
        """Take one character; not after the state has left ``open``."""
        scanner = self._scanner
        if char == "<" and not scanner.in_string:
            self.state = "cut" if self.name is not None else "text"
            return
        before = self.raw
        self.raw += char
        scanner.push(char)
        if scanner.is_bad:
            self.state = "text"
        elif self.name is None:
            self._look_for_name(before, char)
        elif self._in_arguments:
            self._emit(char)
            self._in_arguments = scanner.depth > 1
        if scanner.is_done and self.state == "open":
            self.state = "called" if self.name is not None or self._is_whole_call() else "text"

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments have begun and not ended."""
        return self._in_arguments

    def _look_for_name(self, before: str, char: str) -> None:
        if char == "{" and self._scanner.depth == 2 and (match := _NAME.fullmatch(before)):
            name = _loads(match[1])
            if isinstance(name, str) and self._takes(name, before):
                self.name, self._in_arguments = name, True
                self._emit(char)

    def _is_whole_call(self) -> bool:
        """Whether the object is a call although it is written in another order than usual."""
        call = _loads(self.raw)
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not self._takes(name, ""):
            return False
        arguments = call.get("arguments", call.get("parameters"))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not _is_valid(text) or not isinstance(_loads(text), dict):
            return False
        self.name = name
        self._emit(text)
        return True

    def _takes(self, name: str, head: str) -> bool:
        is_known = self._known is None or name in self._known
        return is_known and _is_valid(name) and (name not in self._heads or head.lstrip() in self._heads[name])


def _is_valid(text: str) -> bool:
    """Whether text can be sent: half of a surrogate pair, which JSON can write as an escape, cannot."""
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
