"""Server-sent events, written directly to the ASGI channel. This code runs for every token of every stream."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from minisgl_core.protocol.messages import Text
from minisgl_server.api.errors import ApiError
from minisgl_server.api.http.request_log import access_record
from minisgl_server.api.openai.choices import Choices
from minisgl_server.api.openai.schemas import StreamOptions

logger = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """Return an event with this JSON data."""
    return b"data: " + encode(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """Return an event named after the ``type`` of its data."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode(data) + b"\n\n"


class StreamEvents(ABC):
    """Encodes the outputs of one request as the events of one API."""

    def begin(self) -> bytes:
        """Return the events before the first output."""
        return b""

    @abstractmethod
    def output(self, index: int, text: Text) -> bytes:
        """Return the events for new output; for `index` see `Generation.next`."""

    def outputs(self, outputs: Sequence[tuple[int, Text]]) -> bytes:
        """Return the events for all outputs that have arrived since the last call; see `Generation.next`."""
        return b"".join([self.output(index, text) for index, text in outputs])

    def end(self) -> bytes:
        """Return the events after the last output of a stream that did not fail."""
        return b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream that failed."""
        return event(error.body())


class ChoiceEvents(StreamEvents):
    """Chunks of OpenAI's APIs, with one choice each. The JSON around the choice is encoded once."""

    def __init__(self, choices: Choices, object_type: str, options: StreamOptions | None) -> None:
        self._choices, self._object_type = choices, object_type
        self._has_final_usage = options is not None and bool(options.include_usage)
        self._has_running_usage = options is not None and bool(options.continuous_usage_stats)
        self._before = event(choices.body(object_type, [])).removesuffix(b"]}\n\n")
        # As OpenAI does, chunks have a null usage if a last chunk with the usage follows.
        self._after = b'],"usage":null}\n\n' if self._has_final_usage else b"]}\n\n"

    @abstractmethod
    def choice(self, index: int, text: Text) -> dict[str, Any]:
        """Return the choice with the new output."""

    def output(self, index: int, text: Text) -> bytes:
        return self.chunk(self.choice(index, text))

    def chunk(self, choice: dict[str, Any], **fields: Any) -> bytes:
        """Return the event with this choice; `fields` follow it."""
        after = b'],"usage":' + encode(self._choices.usage()) + b"}\n\n" if self._has_running_usage else self._after
        if fields:
            after = after.removesuffix(b"}\n\n") + b"," + encode(fields)[1:] + b"\n\n"
        return self._before + encode(choice) + after

    def end(self) -> bytes:
        """Return the chunk with the usage and no choice, if the request asked for it, before the last event."""
        if not self._has_final_usage:
            return super().end()
        return event(self._choices.body(self._object_type, [], usage=self._choices.usage())) + super().end()


class EventStreamResponse(Response):
    """Streams outputs as events, and always closes the generation."""

    def __init__(self, choices: Choices, events: StreamEvents) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._choices, self._events = choices, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._choices.generation
        try:
            generation.is_sending = True  # this waits if the client has not read an earlier response on the connection
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            generation.is_sending = False
            last = b""
            try:
                # In a task of its own. Otherwise, each chunk would resume the coroutines of all middlewares.
                last = await asyncio.create_task(self._send_all(send))
            except ApiError as error:
                last = self._events.error(error)
            except ClientDisconnect:
                access_record(scope).client_gone = True
            except Exception:
                logger.exception("a stream failed")
                last = self._events.error(ApiError(500, "The server failed on this request.", code="internal_error"))
            await send({"type": "http.response.body", "body": last})
        finally:
            generation.close()

    async def _send_all(self, send: Send) -> bytes:
        """Send events until all outputs have ended; return the events that are left to send."""
        choices, events = self._choices, self._events
        generation, outputs = choices.generation, choices.first
        body = events.begin()
        while True:
            body += events.outputs(outputs)
            if generation.is_over:
                return body + events.end()
            generation.is_sending = True
            await send({"type": "http.response.body", "body": body, "more_body": True})
            generation.is_sending = False
            body = b""
            outputs = choices.count_tokens(await generation.next())
