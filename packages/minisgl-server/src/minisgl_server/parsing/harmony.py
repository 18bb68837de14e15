"""The harmony format of gpt-oss (github.com/openai/harmony): an output is a sequence of messages, each in a channel.

openai-harmony parses the tokens of one vocabulary, which it downloads, and fails on an output without tags, such as one that a
grammar constrains. This parser reads text.
"""

from typing import Literal

import regex

from minisgl_core.text.stop import StopFinder
from minisgl_server.parsing.tool_parser import HarmonyToolParser

HARMONY = "gpt_oss"
"""Value of ``--reasoning-parser``."""

HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

_RECIPIENT = regex.compile(r" ?to=\S{0,256}( \w{0,16})?")
"""Matches ``to=NAME`` at the start of an output. The prompt ends with ``<|start|>assistant``."""

_FUNCTION = regex.compile(r"\bto=functions\.(\S+)")
"""Recipient of a message that is a tool call."""

Kind = Literal["reasoning", "content", "call"]


class HarmonySplitter:
    """Splits a stream of text. Messages in the channel ``analysis`` are reasoning content, and others are content.

    If the chat has tools, messages to ``functions.NAME`` are calls. Their texts are the arguments, as JSON.

    Tags, roles, channels and recipients are left out, and a newline separates messages of the same kind. Other text before the
    first tag is content, such as that of an output which a grammar constrains.
    """

    def __init__(self, tools: HarmonyToolParser | None = None) -> None:
        """Start an output; `tools` receives the calls."""
        self._tools = tools
        self._call: HarmonyToolParser | None = None
        """`tools` in the text of a call."""
        self._finder = StopFinder(HARMONY_TAGS)
        self._part: Literal["start", "header", "channel", "message"] = "start"
        """Current part of the output: before the first tag, a role, the name of a channel, or the text of a message."""
        self._start = ""
        """Start of the output, as long as it may be a recipient."""
        self._header: list[str] = []
        """Text since the tag ``<|start|>``, with a space in place of each tag."""
        self._channel: list[str] = []
        """Text since the tag ``<|channel|>``."""
        self._kind: Kind = "content"
        """Kind of the current message."""
        self._separator = ""
        """Text to add before the current message."""
        self._shown: set[Kind] = set()
        """Kinds of the text so far."""
        self.has_begun = False
        """True if there was a message of reasoning content."""

    @property
    def may_be_reasoning(self) -> bool:
        """True if the next text may be reasoning content or belong to the tags around it, and there was no content before."""
        return not (self._part == "message" and self._kind != "reasoning") and self._shown <= {"reasoning"}

    def push(self, text: str, finished: bool) -> tuple[str, str]:
        """Add text; return new reasoning content and new content. With `finished`, nothing is held back."""
        new: dict[Kind, list[str]] = {"reasoning": [], "content": []}
        for char in text:
            if self._tools is not None and self._tools.is_done:
                break
            shown, tag = self._finder.push(char)
            self._add(shown, new)
            if tag is not None:
                self._read(tag, new)
        if finished:
            self._add(self._finder.finish(), new)
            self._show(self._start, new)
            self._start = ""
        return "".join(new["reasoning"]), "".join(new["content"])

    def _add(self, text: str, new: dict[Kind, list[str]]) -> None:
        if self._part in ("header", "channel"):
            self._header.append(text)
        if self._part == "channel":
            self._channel.append(text)
        elif self._part == "message":
            self._show(text, new)
        elif self._part == "start":
            self._start += text
            if not _RECIPIENT.fullmatch(self._start, partial=True):
                self._show(self._start, new)
                self._start = ""

    def _show(self, text: str, new: dict[Kind, list[str]]) -> None:
        if text and self._call is not None:
            self._call.add_arguments(text)
        elif text:
            new[self._kind] += (self._separator, text)
            self._separator = ""
            self._shown.add(self._kind)

    def _read(self, tag: str, new: dict[Kind, list[str]]) -> None:
        if self._call is not None:
            self._call.end_call()
            self._call = None
        if tag == "<|start|>":
            self._header = []
        self._header += (self._start, " ")
        if tag == "<|message|>":
            self._begin_message("".join(self._channel))
        elif tag == "<|constrain|>":
            self._part = "header"
        elif tag == "<|channel|>":
            self._part, self._channel = "channel", []
        else:
            if self._part == "start":
                self._show(self._start, new)
            elif self._part == "channel":
                # The model left out <|message|>: the text follows the channel's name.
                channel, *text = "".join(self._channel).split(maxsplit=1) or [""]
                self._begin_message(channel)
                self._show("".join(text), new)
            self._part, self._channel = "header", []
        self._start = ""

    def _begin_message(self, channel: str) -> None:
        self._part, self._kind = "message", "reasoning" if channel.split()[:1] == ["analysis"] else "content"
        if self._tools is not None and (function := _FUNCTION.search("".join(self._header))):
            self._kind, self._call = "call", self._tools
            self._shown.add("call")
            self._call.begin_call(function[1])
        self._header = []
        self.has_begun |= self._kind == "reasoning"
        self._separator = "\n" if self._kind in self._shown else ""
