"""Content blocks and events of the Messages API."""

from typing import Any

from pydantic import TypeAdapter

from minisgl_core.protocol.messages import Text
from minisgl_core.utils.logs import REQUEST_ID
from minisgl_server.api.errors import ApiError, anthropic_body
from minisgl_server.api.openai.choices import Choices
from minisgl_server.api.openai.event_stream import StreamEvents, encode, typed_event
from minisgl_server.api.openai.segments import Segment, Segments

_OBJECT = TypeAdapter(dict[str, Any])
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Delta type of each kind of segment, and its field."""


class MessageEvents(StreamEvents):
    """Collects the output of one message, and encodes it as events.

    Each segment of the output is a block, with a start, deltas and a stop.
    """

    def __init__(self, model: str, choices: Choices) -> None:
        self.segments = Segments()
        self._choices = choices
        self._common = {"id": choices.id, "type": "message", "role": "assistant", "model": model}
        self._index = -1
        self._open: Segment | None = None
        self._delta = b""
        """Encoded start of each delta of the open block."""

    def finished(self) -> dict[str, Any]:
        """Return the complete message."""
        content = [content_block(segment) for segment in self.segments.all]
        return {**self._common, "content": content, **self._stop_reason(), "usage": self._usage()}

    def _stop_reason(self) -> dict[str, Any]:
        last = self.segments.last
        if last.finish_reason == "stop" and isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": _STOP_REASONS[last.finish_reason or "stop"], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        usage = self._choices.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }

    def begin(self) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return typed_event({"type": "message_start", "message": {**self._common, **empty, "usage": self._usage()}})

    def output(self, index: int, text: Text) -> bytes:
        events = []
        for segment, piece in self.segments.push(text):
            if segment is not self._open:
                events += [self._stop(), self._start(segment)]
            if piece:
                events += [self._delta, encode(piece), b"}}\n\n"]
        return b"".join(events)

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop_reason(), "usage": self._usage()}
        return self._stop() + typed_event(delta) + typed_event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return typed_event(anthropic_body(error, REQUEST_ID.get()))

    def _start(self, segment: Segment) -> bytes:
        self._open, self._index = segment, self._index + 1
        block = content_block(segment, is_empty=True)
        kind, field = _DELTAS[segment.kind]
        delta = typed_event({"type": "content_block_delta", "index": self._index, "delta": {"type": kind}})
        self._delta = delta.removesuffix(b"}}\n\n") + b',"%s":' % field.encode()
        return typed_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _stop(self) -> bytes:
        return b"" if self._open is None else typed_event({"type": "content_block_stop", "index": self._index})


def content_block(segment: Segment, is_empty: bool = False) -> dict[str, Any]:
    """Return a segment as a content block; with `is_empty`, without its content."""
    content = "" if is_empty else segment.content
    if segment.kind == "reasoning":
        return {"type": "thinking", "thinking": content, "signature": ""}
    if segment.kind == "text":
        return {"type": "text", "text": content}
    return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": _input(content)}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Arguments that max_tokens truncated are parsed as far as they go."""
    try:
        return _OBJECT.validate_json(arguments or "{}", experimental_allow_partial=True)
    except ValueError:
        return {}
