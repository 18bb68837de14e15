"""Server-sent events, written straight to the ASGI channel. What is done here is done for each token of each stream."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from minisgl_core.messages import Text
from minisgl_server.api.access import access_of
from minisgl_server.api.choices import Choices
from minisgl_server.api.engine_client import Generation
from minisgl_server.api.errors import ApiError, ClientGoneError
from minisgl_server.api.schemas import StreamOptions

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """One event with this as JSON."""
    return b"data: " + _encode(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """Return an event that is named by the data's type."""
    kind: str = data["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n"


class Chunks(ABC):
    """What the events of one endpoint hold."""

    done = b"data: [DONE]\n\n"
    """Ends a stream that did not fail."""

    def begin(self) -> bytes:
        """Events before the first output."""
        return b""

    @abstractmethod
    def new(self, place: int, text: Text) -> bytes:
        """The event for new output of a request; `place`: see `Generation.next`."""

    def end(self) -> bytes:
        """Events after the last output."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Events that end a stream that failed."""
        return event(error.body())


class ChoiceChunks(Chunks):
    """Chunks as OpenAI's APIs have them, with one choice each.

    What stays the same in them is made into JSON once.

    Args:
        choices: the outputs.
        kind: ``object`` of each chunk.
        options: where a stream tells its usage.
    """

    def __init__(self, choices: Choices, kind: str, options: StreamOptions | None) -> None:
        self._choices, self._kind = choices, kind
        self._tells_usage_at_end = options is not None and bool(options.include_usage)
        self._tells_usage = options is not None and bool(options.continuous_usage_stats)
        self._before = event(choices.body(kind, [])).removesuffix(b"]}\n\n")
        # As OpenAI does, an empty usage where the last chunk has the real one.
        self._after = b'],"usage":null}\n\n' if self._tells_usage_at_end else b"]}\n\n"

    @abstractmethod
    def entry(self, place: int, text: Text) -> dict[str, Any]:
        """The choice, with what is new."""

    def new(self, place: int, text: Text) -> bytes:
        """See `Chunks.new`."""
        return self.chunk(self.entry(place, text))

    def chunk(self, entry: dict[str, Any]) -> bytes:
        """The event with this choice."""
        after = b'],"usage":' + _encode(self._choices.usage()) + b"}\n\n" if self._tells_usage else self._after
        return self._before + _encode(entry) + after

    def end(self) -> bytes:
        """The usage, without a choice."""
        if not self._tells_usage_at_end:
            return b""
        return event(self._choices.body(self._kind, [], usage=self._choices.usage()))


class EventStream(Response):
    """Sends what is new as events and `Chunks.done` at the end; closes the generation whatever happens.

    Args:
        choices: the outputs, begun.
        generation: where they come from; it notices by itself when the client hangs up.
        first: what `Choices.start` returned.
        chunks: what the events hold. Those that are ready together are written together.
    """

    def __init__(self, choices: Choices, generation: Generation, first: list[tuple[int, Text]], chunks: Chunks) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._choices, self._generation, self._outputs, self._chunks = choices, generation, first, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            try:
                # A task of its own: each chunk would otherwise go down and up all of the middlewares' coroutines.
                last = await asyncio.create_task(self._send_all(send)) + self._chunks.done
            except ApiError as error:
                last = self._chunks.error(error)
            except ClientGoneError:
                access_of(scope).is_cut = True
            except Exception:
                logger.exception("a stream failed")
                last = self._chunks.error(ApiError(500, "The server failed on this request.", code="internal_error"))
            await send({"type": "http.response.body", "body": last})
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> bytes:
        """Send events until no more output will come; returns those that are left to send."""
        choices, generation, outputs, new = self._choices, self._generation, self._outputs, self._chunks.new
        body = self._chunks.begin()
        while True:
            body += b"".join([new(place, text) for place, text in outputs])
            if generation.is_over:
                return body + self._chunks.end()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
            outputs = choices.count(await generation.next())
