"""Event streams that go from the API to Serve's proxies over ZeroMQ, because a chunk costs too much CPU time in Serve's calls.

    client <-- proxy <------- call of Serve: headers, and an empty body at the end ------- API
                  ^------- ZeroMQ: events, one message per iteration of the API's event loop ----'

The call lasts as long as the stream, so Serve counts it and tells when the API is lost. `proxy_middleware` adds its
address to the ASGI scope, which clients cannot do. Without that middleware, as with HAProxy, the events stay in the call.
"""

import asyncio
from itertools import count
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_server.ray.connections import Connections

EXTENSION = "minisgl.stream"
"""Key by which proxy and API agree on a direct stream. The proxy sets it in the ``extensions`` of the ASGI scope, to its address
and the number of the stream. The API sets it to True in the first message of a response whose body goes to that address."""


class Chunk(msgspec.Struct, array_like=True):
    """Part of the body of a stream, by the stream's number in the proxy. `index` shows the proxy that a chunk was lost."""

    stream: int
    index: int
    body: bytes
    is_last: bool


class Chunks(msgspec.Struct):
    """API to proxy: chunks of any streams, in order."""

    chunks: list[Chunk]


class DirectStreams:
    """ASGI middleware of the API that sends event streams directly to the proxies that ask for it."""

    def __init__(self, app: ASGIApp, proxies: Connections) -> None:
        self._app, self._proxies = app, proxies
        self._chunks: dict[str, list[Chunk]] = {}
        """Chunks of this iteration of the event loop, by address."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its response to the proxy."""
        target: Any = scope.get("extensions", {}).get(EXTENSION)
        if target is None:
            await self._app(scope, receive, send)
            return
        address, stream = target
        indices, is_stream = count(), False

        async def send_directly(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
                message = {**message, EXTENSION: is_stream}
            elif is_stream:
                is_last = not message.get("more_body", False)
                self._add(address, Chunk(stream, next(indices), message.get("body", b""), is_last))
                if not is_last:
                    return
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        with self._proxies.use(address):
            await self._app(scope, receive, send_directly)

    def _add(self, address: str, chunk: Chunk) -> None:
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._flush)
        self._chunks.setdefault(address, []).append(chunk)

    def _flush(self) -> None:
        for address, chunks in self._chunks.items():
            self._proxies.sender(address).send(Chunks(chunks))
        self._chunks.clear()
