"""The harmony format of gpt-oss (github.com/openai/harmony): an output is a sequence of messages, each in a channel."""

from __future__ import annotations

from typing import Literal

from minisgl_core.text.stop import StopFinder

HARMONY = "gpt_oss"
"""Value of ``--reasoning-parser``."""

TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

Kind = Literal["reasoning", "content"]


class HarmonySplitter:
    """Splits a stream of text. Messages in the channel ``analysis`` are reasoning content, and others are content.

    Tags, roles and channels are left out, and a newline separates messages of the same kind. Text before the first tag is
    content, such as that of an output which a grammar constrains.
    """

    def __init__(self) -> None:
        self._finder = StopFinder(TAGS)
        self._part: Literal["start", "header", "channel", "message"] = "start"
        self._channel = ""
        self._kind: Kind = "content"
        self._separator = ""
        self._shown: set[Kind] = set()
        self._has_begun = False

    @property
    def may_be_reasoning(self) -> bool:
        """True if the next text may be reasoning content, or belong to the tags around it."""
        return not (self._part == "message" and self._kind == "content") and "content" not in self._shown

    @property
    def has_begun(self) -> bool:
        """True if there was a message of reasoning content."""
        return self._has_begun

    def push(self, text: str, finished: bool) -> tuple[str, str]:
        """Add text; return new reasoning content and new content. With `finished`, nothing is held back."""
        new: dict[Kind, str] = {"reasoning": "", "content": ""}
        for char in text:
            shown, tag = self._finder.push(char)
            self._add(shown, new)
            if tag is not None:
                self._read(tag)
        if finished:
            self._add(self._finder.finish(), new)
        return new["reasoning"], new["content"]

    def _add(self, text: str, new: dict[Kind, str]) -> None:
        if self._part == "channel":
            self._channel += text
        elif text and self._part in ("start", "message"):
            new[self._kind] += self._separator + text
            self._separator = ""
            self._shown.add(self._kind)

    def _read(self, tag: str) -> None:
        if tag == "<|channel|>":
            self._part, self._channel = "channel", ""
        elif tag == "<|message|>":
            self._part = "message"
            self._kind = "reasoning" if self._channel.split()[:1] == ["analysis"] else "content"
            self._has_begun |= self._kind == "reasoning"
            self._separator = "\n" if self._kind in self._shown else ""
        else:
            self._part = "header"
