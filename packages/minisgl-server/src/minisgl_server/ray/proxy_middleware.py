"""ASGI middleware of Serve's proxies, which ends each response of the API with an error where Serve would close the connection.

A proxy is a process on each node, between the clients and the deployment API. It closes the connection if the replica of the API
is lost. If the head of the cluster is lost, Ray ends the processes of all other nodes about a minute later.

Serve applies the middleware to all applications of the cluster; it changes only the responses of the one named `API_APP`.
"""

from __future__ import annotations

import asyncio
import os
import time

import ray
from ray.serve.context import _get_serve_request_context
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_server.api.errors import ANTHROPIC_PATH, ApiError, anthropic_body
from minisgl_server.api.openai.event_stream import event, typed_event
from minisgl_server.ray import API_APP

POLL_S = 2.0
"""Time between two calls to the head of the cluster."""
HEAD_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) - 20.0  # noqa: SIM112  # Ray's name
"""Longest time that the head may take to answer, some seconds less than Ray's own limit, after which Ray ends this process."""


def middlewares() -> list[Middleware]:
    """Return the middlewares of a proxy; RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function."""
    return [Middleware(FinalErrorMiddleware)]


class FinalErrorMiddleware:
    """Ends the responses of lost replicas with an error, and all responses if the head of the cluster is lost.

    Args:
        app: Serve's proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._responses: set[ProxiedResponse] = set()
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and complete its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_head())
        response = ProxiedResponse(scope, receive, send)
        self._responses.add(response)
        try:
            await self._app(scope, response.receive, response.send)
            response.find_application()
            await response.fail(replica_lost())
        finally:
            self._responses.discard(response)

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
                for response in list(self._responses):
                    await response.fail(head_lost())


class ProxiedResponse:
    """Response that passes through the proxy, until it is complete or has failed."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._is_of_api = self._is_started = self._is_event_stream = self._is_over = False

    async def receive(self) -> Message:
        """Return the next message of the client."""
        self.find_application()
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Pass a message on, or fail in place of Serve's own errors."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self.find_application()
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            # Errors of the API are JSON.
            if self._is_of_api and message["status"] >= 500 and content_type.startswith("text/plain"):
                await self.fail(replica_lost())
                return
            self._is_started = True
            self._is_event_stream = content_type.startswith("text/event-stream")
        elif not message.get("more_body", False):
            self._is_over = True
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End the response with an error if it is not complete: by an event in a stream, and by a response before it."""
        if self._is_over or not self._is_of_api:
            return
        path = self._scope["path"].removeprefix(self._scope.get("root_path", ""))
        if not self._is_started:
            self._is_over = True
            await error.response(path)(self._scope, self._receive, self._send)
        elif self._is_event_stream:
            self._is_over = True
            await self._send({"type": "http.response.body", "body": error_event(error, path)})

    def find_application(self) -> None:
        """Note if the request is for the API; only callers in the context of the request can tell."""
        self._is_of_api = _get_serve_request_context().app_name == API_APP


def error_event(error: ApiError, path: str) -> bytes:
    """Return the last event of a stream that failed, in the format of the API that `path` belongs to."""
    if path.startswith(ANTHROPIC_PATH):
        return typed_event(anthropic_body(error, ""))
    if path.startswith("/v1/responses"):
        return typed_event({"type": "error", "code": error.code, "message": error.message, "param": None})
    return event(error.body())


def replica_lost() -> ApiError:
    """Return the error of a request whose replica of the API has ended."""
    message = "The replica of the API that ran the request has ended. Please send it again."
    return ApiError(503, message, code="replica_lost")


def head_lost() -> ApiError:
    """Return the error of a request on a cluster without a head."""
    return ApiError(500, "The head of the Ray cluster has not answered.", code="engine_stopped")
