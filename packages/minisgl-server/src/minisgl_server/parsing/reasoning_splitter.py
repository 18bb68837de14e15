"""Separates the reasoning content of an output from its content."""

from typing import Literal

from minisgl_server.parsing.harmony import HARMONY

THINK_START, THINK_END = "<think>", "</think>"
REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True, HARMONY: False}
"""Values of ``--reasoning-parser``; True if outputs begin with reasoning content even without a tag."""


def starts_with_reasoning(parser: str, prompt: str) -> bool | None:
    """Return True if the output begins with reasoning content, and False if not. None if the end of the prompt does not tell."""
    end = prompt.rstrip()
    if end.endswith(THINK_START):
        return True
    if end.endswith(THINK_END):
        return False
    return True if REASONING_PARSERS[parser] else None


class ReasoningSplitter:
    """Splits a stream of text. The tags and the whitespace around reasoning content are left out."""

    def __init__(self, starts_inside: bool | None) -> None:
        """Take the result of `starts_with_reasoning`. Unless it is False, an opening tag is recognized."""
        self._inside_without_tag = bool(starts_inside)
        self._state: Literal["start", "inside", "after", "outside"] = "outside" if starts_inside is False else "start"
        self._held = ""
        """Text that is held back, as it may be the beginning of a tag."""
        self._space: list[str] = []
        """Whitespace that is held back. A list, as an output of whitespace must not take quadratic time."""
        self._has_reasoning = False
        self.has_begun = False
        """True if there was reasoning content or its opening tag."""

    @property
    def may_be_reasoning(self) -> bool:
        """True if the next text may be reasoning content."""
        return self._state in ("start", "inside")

    def push(self, text: str, finished: bool) -> tuple[str, str]:
        """Add text; return new reasoning content and new content. With `finished`, nothing is held back."""
        text, self._held = self._held + text, ""
        reasoning = space = ""
        if self._state == "start":
            space, text = self._read_start(text, finished)
        if self._state == "inside":
            text, end, rest = text.partition(THINK_END)
            if not end and not finished:
                lengths = range(len(THINK_END), 0, -1)
                num_held = next((length for length in lengths if text.endswith(THINK_END[:length])), 0)
                text, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
            reasoning, text = self._stripped(text), rest
            self._state = "after" if end else "inside"
        if self._state == "after":
            text = text.lstrip()
            self._state = "outside" if text else "after"
        return reasoning, space + text

    def _read_start(self, text: str, finished: bool) -> tuple[str, str]:
        """Look for the opening tag, if it is not too early to tell. Return the whitespace before content, and the other text."""
        start = text.lstrip()
        self._space.append(text[: len(text) - len(start)])
        if THINK_START.startswith(start) and start != THINK_START and not finished:
            self._held = start
            return "", ""
        space, self._space = "".join(self._space), []
        if start.startswith(THINK_START) or self._inside_without_tag:
            self._state, self.has_begun = "inside", True
            return "", start.removeprefix(THINK_START)
        self._state = "outside"
        return space, start

    def _stripped(self, text: str) -> str:
        """Return reasoning content without whitespace around it. Whitespace at the end is held back until other text follows."""
        text = text if self._has_reasoning else text.lstrip()
        shown = text.rstrip()
        space = text[len(shown) :]
        if shown:
            shown, self._space, self._has_reasoning = "".join(self._space) + shown, [], True
        self._space.append(space)
        return shown
