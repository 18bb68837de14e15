"""Separates the reasoning content of an output from its content."""

from typing import Literal

from minisgl_core.text.stop import StopFinder
from minisgl_server.parsing.harmony import HARMONY

BEGIN, END = "<think>", "</think>"
REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True, HARMONY: False}
"""Values of ``--reasoning-parser``; True if outputs begin with reasoning content even without a tag."""


def starts_with_reasoning(parser: str, prompt: str) -> bool | None:
    """Return True if the output begins with reasoning content, by the end of the prompt; None if it does not tell."""
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return True
    if end.endswith(END):
        return False
    return True if REASONING_PARSERS[parser] else None


class ReasoningSplitter:
    """Splits a stream of text. The tags and the whitespace around reasoning content are left out."""

    def __init__(self, inside: bool | None) -> None:
        """`inside` is the result of `starts_with_reasoning`; unless it is False, an opening tag is recognized."""
        self._inside_without_tag = bool(inside)
        self._state: Literal["start", "inside", "after", "outside"] = "outside" if inside is False else "start"
        self._start: list[str] = []
        """Characters at the start of the output, as long as they may be the opening tag."""
        self._tag = ""
        """The same without whitespace before the tag."""
        self._finder = StopFinder((END,))
        self._space: list[str] = []
        """Whitespace that is held back."""
        self._has_reasoning = False
        self.has_begun = False
        """True if there was reasoning content or its opening tag."""

    @property
    def may_be_reasoning(self) -> bool:
        """True if the next text may be reasoning content."""
        return self._state in ("start", "inside")

    def push(self, text: str, finished: bool) -> tuple[str, str]:
        """Add text; return new reasoning content and new content. With `finished`, nothing is held back."""
        reasoning: list[str] = []
        content = ""
        for index, char in enumerate(text):
            if self._state == "start":
                content += self._look_for_tag(char, reasoning)
            elif self._state == "inside":
                self.has_begun = True
                self._add_reasoning(char, reasoning)
            elif self._state == "outside" or not char.isspace():
                self._state = "outside"
                content += text[index:]
                break
        if finished:
            if self._state == "inside":
                self._add_stripped(self._finder.finish(), reasoning)
            elif self._inside_without_tag:
                self._add_stripped("".join(self._start), reasoning)
            else:
                content += "".join(self._start)
            self._start = []
        return "".join(reasoning), content

    def _look_for_tag(self, char: str, reasoning: list[str]) -> str:
        """Add a character that may belong to the opening tag; return the text that turns out to be content."""
        self._start.append(char)
        if self._tag or not char.isspace():
            self._tag += char
        if BEGIN.startswith(self._tag) and self._tag != BEGIN:
            return ""
        start, self._start = "".join(self._start), []
        if self._tag == BEGIN:
            self._state, self.has_begun = "inside", True
        elif self._inside_without_tag:
            self._state, self.has_begun = "inside", True
            for each in start:
                self._add_reasoning(each, reasoning)
        else:
            self._state = "outside"
            return start
        return ""

    def _add_reasoning(self, char: str, reasoning: list[str]) -> None:
        shown, found = self._finder.push(char)
        self._add_stripped(shown, reasoning)
        if found is not None:
            self._state = "after"

    def _add_stripped(self, text: str, reasoning: list[str]) -> None:
        """Add reasoning content. Whitespace is held back, as it is dropped at the start and end."""
        for char in text:
            if char.isspace():
                self._space.append(char)
            else:
                if self._has_reasoning:
                    reasoning += self._space
                reasoning.append(char)
                self._has_reasoning, self._space = True, []
