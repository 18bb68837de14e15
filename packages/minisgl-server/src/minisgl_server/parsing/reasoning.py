"""A thinking model's thoughts, apart from its answer."""

from __future__ import annotations

from typing import Literal

from minisgl_core.text.stop import StopFinder

BEGIN, END = "<think>", "</think>"
REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True}
"""By the name that ``--reasoning-parser`` takes: whether an output begins with thoughts even where no tag says so."""


def begins_inside(parser: str, prompt: str) -> bool | None:
    """Whether an output goes on with thoughts: True or False where the prompt's end tells, else None for a look at its tag."""
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return True
    if end.endswith(END):
        return False
    return True if REASONING_PARSERS[parser] else None


class ReasoningSplitter:
    """Takes text as it comes. The tags and the white space around thoughts are left out."""

    def __init__(self, inside: bool | None) -> None:
        """`inside`: see `begins_inside`; an opening tag is taken in any case, except where it is False."""
        self._inside_without_tag = bool(inside)
        self._state: Literal["start", "inside", "after", "outside"] = "outside" if inside is False else "start"
        self._start = ""
        """The beginning of the output, while it may be the opening tag."""
        self._finder = StopFinder((END,))
        self._space = ""
        self._has_thoughts = False
        self._has_begun = False

    @property
    def is_open(self) -> bool:
        """Return if what comes next may be reasoning content."""
        return self._state in ("start", "inside")

    @property
    def has_begun(self) -> bool:
        """Return if there was reasoning content, or its tag."""
        return self._has_begun

    def push(self, text: str, finished: bool) -> tuple[str, str]:
        """New thoughts and new text of the answer; with `finished`, nothing is held back any more."""
        thoughts: list[str] = []
        answer = ""
        for place, char in enumerate(text):
            if self._state == "start":
                answer += self._look_for_tag(char, thoughts)
            elif self._state == "inside":
                self._has_begun = True
                self._think(char, thoughts)
            elif self._state == "outside" or not char.isspace():
                self._state = "outside"
                answer += text[place:]
                break
        if finished:
            if self._state == "inside":
                self._keep(self._finder.finish(), thoughts)
            elif self._inside_without_tag:
                self._keep(self._start, thoughts)
            else:
                answer += self._start
            self._start = ""
        return "".join(thoughts), answer

    def _look_for_tag(self, char: str, thoughts: list[str]) -> str:
        """Returns what turns out to be the answer's beginning."""
        self._start += char
        found = self._start.lstrip()
        if BEGIN.startswith(found) and found != BEGIN:
            return ""
        start, self._start = self._start, ""
        if found == BEGIN:
            self._state, self._has_begun = "inside", True
        elif self._inside_without_tag:
            self._state, self._has_begun = "inside", True
            for each in start:
                self._think(each, thoughts)
        else:
            self._state = "outside"
            return start
        return ""

    def _think(self, char: str, thoughts: list[str]) -> None:
        shown, found = self._finder.push(char)
        self._keep(shown, thoughts)
        if found is not None:
            self._state = "after"

    def _keep(self, text: str, thoughts: list[str]) -> None:
        """Thoughts; white space waits, as it is dropped at their beginning and end."""
        for char in text:
            if char.isspace():
                self._space += char
            else:
                thoughts.append(self._space + char if self._has_thoughts else char)
                self._has_thoughts, self._space = True, ""
