"""Typed events of a streamed response."""

from collections.abc import Callable
from typing import Any

from minisgl_core.protocol.messages import Text
from minisgl_server.api.errors import ApiError
from minisgl_server.api.openai.event_stream import StreamEvents, encode, typed_event
from minisgl_server.api.openai.segments import Segment
from minisgl_server.api.openai_responses.response_object import ResponseObject, content_part

_DELTAS = {
    "reasoning": ("response.reasoning_text", "text"),
    "text": ("response.output_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""Event name of each kind of segment, and the field of its last event that has the whole content."""


class ResponseEvents(StreamEvents):
    """Encodes the output of one response as numbered events; `finish` returns the complete response at the end.

    Each segment of the output is an item, with an event when it is added, deltas, and an event when it is done.
    """

    def __init__(self, response: ResponseObject, finish: Callable[[], dict[str, Any]]) -> None:
        self._response, self._finish = response, finish
        self._sequence_number = -1
        self._index = -1
        """Index of the open item, to which new output is added."""
        self._open: Segment | None = None
        self._delta = b""
        """Encoded start of each delta of the open item, up to its sequence number."""

    def begin(self) -> bytes:
        body = self._response.started()
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def output(self, index: int, text: Text) -> bytes:
        events = []
        # Index of the first new log-probability of the open item.
        first_logprob = 0 if self._open is None else len(self._open.logprobs)
        for segment, piece in self._response.segments.push(text):
            if segment is not self._open:
                events += [self._close("completed"), self._add(segment)]
                first_logprob = 0
            if not piece:
                continue
            self._sequence_number += 1
            events += [self._delta, b"%d" % self._sequence_number, b',"delta":', encode(piece)]
            if segment.kind == "text":
                events += [b',"logprobs":', encode(segment.logprobs[first_logprob:])]
            events.append(b"}\n\n")
        return b"".join(events)

    def end(self) -> bytes:
        body = self._finish()
        return self._close(body["status"]) + self._event(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        return self._event(
            "error", code=error.code or "server_error", message=error.message, param=error.param
        ) + self._event("response.failed", response=self._response.failed(error.message))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return typed_event({"type": kind, "sequence_number": self._sequence_number, **fields})

    def _position(self, segment: Segment) -> dict[str, Any]:
        position: dict[str, Any] = {"item_id": self._response.item_id(segment), "output_index": self._index}
        return position if segment.kind == "call" else {**position, "content_index": 0}

    def _add(self, segment: Segment) -> bytes:
        self._open, self._index = segment, self._index + 1
        item = self._response.item(segment, "in_progress", is_empty=True)
        events = self._event("response.output_item.added", output_index=self._index, item=item)
        position = self._position(segment)
        if segment.kind != "call":
            events += self._event("response.content_part.added", **position, part=content_part(segment, is_empty=True))
        delta = typed_event({"type": f"{_DELTAS[segment.kind][0]}.delta", **position})
        self._delta = delta.removesuffix(b"}\n\n") + b',"sequence_number":'
        return events

    def _close(self, status: str) -> bytes:
        segment = self._open
        if segment is None:
            return b""
        position = self._position(segment)
        kind, field = _DELTAS[segment.kind]
        fields: dict[str, Any] = {field: segment.content}
        if segment.kind == "text":
            fields["logprobs"] = segment.logprobs
        elif segment.kind == "call":
            fields["name"] = segment.name
        events = self._event(f"{kind}.done", **position, **fields)
        if segment.kind != "call":
            events += self._event("response.content_part.done", **position, part=content_part(segment))
        item = self._response.item(segment, status)
        return events + self._event("response.output_item.done", output_index=self._index, item=item)
