"""Typed events of a streamed response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from minisgl_core.messages import Text
from minisgl_server.api.errors import ApiError
from minisgl_server.api.responses.body import ResponseBody, part_of
from minisgl_server.api.segments import Segment
from minisgl_server.api.streaming import Chunks, typed_event

_encode = msgspec.json.Encoder().encode
_DELTAS = {
    "reasoning": ("response.reasoning_text", "text"),
    "text": ("response.output_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""Names of the events of each kind of segment, and the field that the last one has all of it in."""


class ResponseEvents(Chunks):
    """Events of one response, numbered.

    Each segment of the output is an item: it is added, grows by deltas and is done before the next one is added.

    Args:
        response: the response.
        finish: called at the end; returns the whole response.
    """

    done = b""

    def __init__(self, response: ResponseBody, finish: Callable[[], dict[str, Any]]) -> None:
        self._response, self._finish = response, finish
        self._number = -1
        self._index = -1
        """Place of the item that is open."""
        self._open: Segment | None = None
        self._delta = b""
        """Beginning of each delta of the open item, up to its number."""

    def begin(self) -> bytes:
        """Return the events before the first output."""
        body = self._response.started()
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def new(self, place: int, text: Text) -> bytes:
        """See `Chunks.new`."""
        events = b""
        first_logprob = self._num_logprobs()
        for segment, piece in self._response.segments.push(text):
            if segment is not self._open:
                events += self._close("completed") + self._add(segment)
                first_logprob = 0
            if not piece:
                continue
            self._number += 1
            events += self._delta + b"%d" % self._number + b',"delta":' + _encode(piece)
            if segment.kind == "text":
                events += b',"logprobs":' + _encode(segment.logprobs[first_logprob:])
            events += b"}\n\n"
        return events

    def end(self) -> bytes:
        """Return the events after the last output."""
        body = self._finish()
        return self._close(body["status"]) + self._event(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a response that failed."""
        return self._event(
            "error", code=error.code or "server_error", message=error.message, param=error.param
        ) + self._event("response.failed", response=self._response.failed(error.message))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return typed_event({"type": kind, "sequence_number": self._number, **fields})

    def _num_logprobs(self) -> int:
        return 0 if self._open is None else len(self._open.logprobs)

    def _place(self, segment: Segment) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._response.item_id(segment), "output_index": self._index}
        return place if segment.kind == "call" else {**place, "content_index": 0}

    def _add(self, segment: Segment) -> bytes:
        self._open, self._index = segment, self._index + 1
        item = self._response.item(segment, "in_progress", is_empty=True)
        events = self._event("response.output_item.added", output_index=self._index, item=item)
        place = self._place(segment)
        if segment.kind != "call":
            events += self._event("response.content_part.added", **place, part=part_of(segment, is_empty=True))
        head = typed_event({"type": f"{_DELTAS[segment.kind][0]}.delta", **place})
        self._delta = head.removesuffix(b"}\n\n") + b',"sequence_number":'
        return events

    def _close(self, status: str) -> bytes:
        segment = self._open
        if segment is None:
            return b""
        place = self._place(segment)
        kind, field = _DELTAS[segment.kind]
        fields: dict[str, Any] = {field: segment.content}
        if segment.kind == "text":
            fields["logprobs"] = segment.logprobs
        elif segment.kind == "call":
            fields["name"] = segment.name
        events = self._event(f"{kind}.done", **place, **fields)
        if segment.kind != "call":
            events += self._event("response.content_part.done", **place, part=part_of(segment))
        item = self._response.item(segment, status)
        return events + self._event("response.output_item.done", output_index=self._index, item=item)
