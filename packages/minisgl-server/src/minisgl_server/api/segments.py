"""Segments of one output, in order: reasoning content, text and tool calls, as the Responses and the Messages API have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl_core.messages import Text
from minisgl_server.api.logprobs import chat_logprobs

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Segment:
    """One segment.

    Attributes:
        pieces: its text so far, or the arguments of the call.
        logprobs: entries of the tokens of a text, where they were asked for.
        call_id: id of the call, and `name` the function's.
    """

    kind: Kind
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def content(self) -> str:
        """All of the text so far."""
        return "".join(self.pieces)


class Segments:
    """Splits an output as it comes.

    Attributes:
        all: the segments so far. Only the last one still grows.
        last: the newest output.
    """

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self.last = Text(request_id="", text="", token_ids=[])

    def push(self, text: Text) -> list[tuple[Segment, str]]:
        """Add new output; return what is new, by segment."""
        self.last = text
        # More of a call comes first: it belongs to what is still the last segment.
        new = [(self.all[-1], call.arguments) for call in text.tool_calls if call.id is None]
        if text.reasoning:
            new.append((self._open("reasoning"), text.reasoning))
        if text.text:
            segment = self._open("text")
            new.append((segment, text.text))
            if (logprobs := chat_logprobs(text)) is not None:
                segment.logprobs += logprobs["content"]
        for call in text.tool_calls:
            if call.id is not None:
                self.all.append(Segment("call", call_id=call.id, name=call.name or ""))
                new.append((self.all[-1], call.arguments))
        for segment, piece in new:
            segment.pieces.append(piece)
        return new

    def _open(self, kind: Kind) -> Segment:
        if not self.all or self.all[-1].kind != kind:
            self.all.append(Segment(kind))
        return self.all[-1]
