"""Server-sent events, written straight to the ASGI channel."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from minisgl_server.api.access import access_of
from minisgl_server.api.choices import Choices
from minisgl_server.api.engine_client import Generation
from minisgl_server.api.errors import ApiError, ClientGoneError
from minisgl_server.api.schemas import StreamOptions

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


class EventStream(Response):
    """Sends each chunk as one event and ``[DONE]`` at the end; closes the generation whatever happens.

    Args:
        generation: what the chunks are made from; it notices by itself when the client hangs up.
        batches: chunks that are ready together, and are written together.
    """

    def __init__(self, generation: Generation, batches: AsyncIterator[list[dict[str, Any]]]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._generation = generation
        self._batches = batches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunks in self._batches:
                    await send({"type": "http.response.body", "body": _events(chunks), "more_body": True})
                last = b"data: [DONE]\n\n"
            except ApiError as error:
                last = _events([error.body()])
            except ClientGoneError:
                access_of(scope).is_cut = True
                last = b""
            except Exception:
                logger.exception("a stream failed")
                last = _events([ApiError(500, "The server failed on this request.", code="internal_error").body()])
            await send({"type": "http.response.body", "body": last})
        finally:
            self._generation.close()


class UsageOptions:
    """Where a stream tells its usage."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.at_end = options is not None and bool(options.include_usage)
        self._in_chunks = options is not None and bool(options.continuous_usage_stats)

    def of_chunk(self, choices: Choices) -> dict[str, Any]:
        """Fields to add to a chunk; as OpenAI does, an empty usage where the last chunk has the real one."""
        if self._in_chunks:
            return {"usage": choices.usage()}
        return {"usage": None} if self.at_end else {}


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks)
