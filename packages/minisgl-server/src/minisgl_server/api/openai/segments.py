"""Segments of an output in order: reasoning content, text and tool calls; the Responses and Messages APIs return these."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl_core.protocol.messages import Text
from minisgl_server.api.openai.logprobs import chat_logprobs

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive output of one kind.

    Attributes:
        pieces: text, or arguments of the call, so far.
        logprobs: log-probabilities of a text's tokens, if the request asked for them.
    """

    kind: Kind
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def content(self) -> str:
        """Return the text so far."""
        return "".join(self.pieces)


class Segments:
    """Splits the output of a request into segments. Of `all` segments so far, only the last one can grow."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self.last = Text(request_id="", text="", token_ids=[])
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is still held back."""

    def push(self, text: Text) -> list[tuple[Segment, str]]:
        """Add new output; return the new pieces with their segments."""
        self.last = text
        # The rest of a call comes first, as the call is still the last segment. A `Text` may have all parts of several calls:
        # tokenizer workers buffer output that may have to be generated again (`RequestOutput.is_buffered`).
        calls = deque(text.tool_calls)
        new: list[tuple[Segment, str]] = []
        while calls and calls[0].id is None:
            new.append((self.all[-1], calls.popleft().arguments))
        if text.reasoning:
            new.append((self._open("reasoning"), text.reasoning))
        if (logprobs := chat_logprobs(text)) is not None:
            self._logprobs += logprobs["content"]
        if text.text:
            segment = self._open("text")
            new.append((segment, text.text))
            segment.logprobs += self._logprobs if segment.pieces else _without_tags(self._logprobs, text.text)
        if text.text or text.reasoning or text.tool_calls:
            self._logprobs = []
        for call in calls:
            if call.id is not None:
                self.all.append(Segment("call", call_id=call.id, name=call.name or ""))
            new.append((self.all[-1], call.arguments))
        for segment, piece in new:
            segment.pieces.append(piece)
        if text.finish_reason is not None and self.all and self.all[-1].kind == "text":
            self.all[-1].logprobs += self._logprobs  # those of tokens without text, such as the tokens of a stop string
            self._logprobs = []
        return new

    def _open(self, kind: Kind) -> Segment:
        if not self.all or self.all[-1].kind != kind:
            self.all.append(Segment(kind))
        return self.all[-1]


def _without_tags(logprobs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the entries from the token on in which `text` begins; before it are tags of reasoning content or tool calls."""
    data, wanted = b"".join(bytes(each["bytes"]) for each in logprobs), text.encode()
    if data.endswith(wanted):
        begin = len(data) - len(wanted)
    else:  # the end may be held back; reasoning content, calls and tags before the text may contain the same characters
        last = data.rfind(wanted)
        begin = data.find(wanted, max(data.rfind(closing, 0, last) for closing in (b">", b"]", b"}")) + 1)
    for index, each in enumerate(logprobs):
        if begin < len(each["bytes"]):
            return logprobs[index:]
        begin -= len(each["bytes"])
    return []
