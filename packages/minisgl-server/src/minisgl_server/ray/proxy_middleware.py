"""ASGI middleware of Serve's proxies: it receives event streams, and ends responses with an error.

A proxy is a process on each node, between the clients and the deployment API. Events of streams bypass Serve's calls; see
`direct_streams`. Serve's proxy closes the connection if the replica of the API is lost. If the head of the cluster is lost, Ray
ends the processes of all other nodes about a minute later. In both cases, the middleware first sends an error.

Serve applies the middleware to all applications of the cluster; it changes only the responses of the one named `API_APP`.
"""

import asyncio
import os
import time
from itertools import count

import ray
from ray.serve.context import _get_serve_request_context
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_core.runtime.ipc import AsyncReceiver
from minisgl_server.api.engine_client import MAX_UNSENT_BYTES
from minisgl_server.api.errors import ApiError, anthropic_body, slow_client
from minisgl_server.api.http.request_log import ANTHROPIC_PATH
from minisgl_server.api.openai.event_stream import event, typed_event
from minisgl_server.ray import API_APP
from minisgl_server.ray.connections import open_receiver
from minisgl_server.ray.direct_streams import EXTENSION, Chunk, Chunks

POLL_S = 2.0
"""Interval of the calls to the head of the cluster."""
HEAD_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) - 20.0  # noqa: SIM112  # Ray's name
"""Longest time that the head may take to answer, some seconds less than Ray's own limit, after which Ray ends this process."""
LAST_CHUNK_S = 10.0
"""Longest time from the end of Serve's call to the arrival of the stream's last chunk."""


def middlewares() -> list[Middleware]:
    """Return the middlewares of a proxy; RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """Passes event streams of the API on, and ends responses with an error if their replica or the cluster's head is lost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._responses: dict[int, ProxiedResponse] = {}
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []
        self._address = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and complete its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._tasks:
            receiver, self._address = open_receiver(Chunks)
            self._tasks = [asyncio.create_task(each) for each in (self._watch_head(), self._take_chunks(receiver))]
        number = next(self._numbers)
        response = self._responses[number] = ProxiedResponse(scope, receive, send)
        scope.setdefault("extensions", {})[EXTENSION] = (self._address, number)
        try:
            await self._app(scope, response.receive, response.send)
            response.find_application()
            await response.fail(response.error or replica_lost())
        except asyncio.CancelledError:
            if response.error is None:
                raise
            await response.fail(response.error)
        finally:
            del self._responses[number]
            response.close()

    async def _take_chunks(self, receiver: AsyncReceiver[Chunks]) -> None:
        """Pass the chunks of the API on to the responses, if they are not over."""
        while True:
            for chunk in (await receiver.receive()).chunks:
                if response := self._responses.get(chunk.stream):
                    response.take(chunk)

    async def _watch_head(self) -> None:
        """Fail all responses while the head does not answer. Calls to a lost head take a minute."""
        call, seen_s = asyncio.create_task(asyncio.to_thread(ray.nodes)), time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if call.done():
                if call.exception() is None:
                    seen_s = time.monotonic()
                call = asyncio.create_task(asyncio.to_thread(ray.nodes))
            if time.monotonic() - seen_s > HEAD_S:
                error = ApiError(500, "The head of the Ray cluster has not answered.", code="engine_stopped")
                failing = (response.fail(error) for response in self._responses.values())
                await asyncio.gather(*failing, return_exceptions=True)  # some clients may be gone


class ProxiedResponse:
    """Response that passes through the proxy, until it is complete or has failed. `error` is why its request is cancelled."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send_message = scope, receive, send
        self._num_events = 0
        self._is_of_api = self._is_started = self._is_event_stream = self._is_over = False
        self.error: ApiError | None = None
        self._task = asyncio.current_task()
        self._chunks: list[Chunk] = []
        """Chunks that have arrived and were not sent."""
        self._num_bytes = 0
        self._num_chunks = 0
        self._arrived, self._all_arrived = asyncio.Event(), asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        """Sends the chunks, if the body does not come by Serve's call."""

    async def receive(self) -> Message:
        """Return the next message of the client."""
        self.find_application()
        return await self._receive()

    def take(self, chunk: Chunk) -> None:
        """Take a chunk of the body. If one is missing, or too many bytes wait for the client, the request is cancelled."""
        if chunk.index != self._num_chunks:
            self._cancel(replica_lost())
            return
        self._num_chunks += 1
        self._num_bytes += len(chunk.body)
        self._chunks.append(chunk)
        self._arrived.set()
        if chunk.is_last:
            self._all_arrived.set()
        elif self._num_bytes > MAX_UNSENT_BYTES:
            self._cancel(slow_client())

    def _cancel(self, error: ApiError) -> None:
        if self.error is None and self._task is not None:
            self.error = error
            self._task.cancel()

    async def send(self, message: Message) -> None:
        """Pass a message on, or fail in place of Serve's own errors."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self.find_application()
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            # Errors of the API are JSON, so this one is Serve's.
            if self._is_of_api and message["status"] >= 500 and content_type.startswith("text/plain"):
                await self.fail(replica_lost())
                return
            headers = MutableHeaders(scope=message)
            if self._is_of_api and (ids := headers.getlist("x-request-id")):
                headers["x-request-id"] = ids[0]  # Serve's proxy appends another one
            self._is_started = True
            self._is_event_stream = content_type.startswith("text/event-stream")
            is_direct = message.pop(EXTENSION, False)
            await self._send(message)
            if is_direct:
                self._writer = asyncio.create_task(self._write())
            return
        if self._writer is not None:
            try:
                await asyncio.wait_for(self._all_arrived.wait(), LAST_CHUNK_S)
                await self._writer
            except TimeoutError:
                await self.fail(replica_lost())
            except asyncio.CancelledError:
                if self.error is None:
                    raise
                await self.fail(self.error)  # Serve's call has ended already
            return
        if not message.get("more_body", False):
            self._is_over = True
        await self._send(message)

    async def _send(self, message: Message) -> None:
        self._num_events += message.get("body", b"").count(b"\n\n")  # an empty line ends each event
        await self._send_message(message)

    async def _write(self) -> None:
        """Send the chunks. Those that arrive while the client is not ready are sent together."""
        while not self._is_over:
            await self._arrived.wait()
            self._arrived.clear()
            if self._is_over:
                return
            chunks, self._chunks, self._num_bytes = self._chunks, [], 0
            self._is_over = chunks[-1].is_last
            body = b"".join([each.body for each in chunks])
            await self._send({"type": "http.response.body", "body": body, "more_body": not self._is_over})

    def close(self) -> None:
        """Send no more chunks."""
        if self._writer is not None:
            self._writer.cancel()

    async def fail(self, error: ApiError) -> None:
        """End the response with an error if it is not complete.

        The error is the response if none has begun, and the last event of a stream. Serve closes the connection of other
        responses.
        """
        if self._is_over or not self._is_of_api:
            return
        path = self._scope["path"].removeprefix(self._scope.get("root_path", ""))
        if not self._is_started:
            self._is_over = True
            await error.response(path)(self._scope, self._receive, self._send)
        elif self._is_event_stream:
            self._is_over = True
            await self._send({"type": "http.response.body", "body": error_event(error, path, self._num_events)})

    def find_application(self) -> None:
        """Record whether Serve routes the request to the API. Serve stores that in a context variable of the request."""
        self._is_of_api = _get_serve_request_context().app_name == API_APP


def error_event(error: ApiError, path: str, number: int) -> bytes:
    """Return the last event of a stream that failed, in the format of the API of `path`, after `number` other events."""
    if path.startswith(ANTHROPIC_PATH):
        return typed_event(anthropic_body(error, ""))
    if path.startswith("/v1/responses"):
        fields = {"code": error.code, "message": error.message, "param": None}
        return typed_event({"type": "error", "sequence_number": number, **fields})
    return event(error.body())


def replica_lost() -> ApiError:
    """Return the error of a request whose replica of the API has ended."""
    message = "The replica of the API that ran the request has ended. Please send it again."
    return ApiError(503, message, code="replica_lost")
