"""ASGI middleware before the application: API keys, body size and timeout, and concurrency.

It adds no coroutine per chunk of a response.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_server.api.errors import ApiError, body_too_large
from minisgl_server.api.http.host_check import HostMiddleware, OriginMiddleware
from minisgl_server.api.http.request_log import RequestLogMiddleware
from minisgl_server.api.limits import MAX_BODY_BYTES, RequestLimits
from minisgl_server.api.public_paths import PublicPaths
from minisgl_server.options import ServerOptions

_LINGER_S = 5.0
"""Time for which the rest of a refused body is read and dropped. If the connection were closed at once, a client that writes
its whole body before it reads would see a connection error instead of the response."""
BODY_TIMEOUT_S = 60.0
"""Maximum wait for the next part of a body."""
MIN_BODY_BYTES_PER_S = 16 * 1024
"""Minimum mean rate of a body after `BODY_TIMEOUT_S`. A slow client keeps its slot among the concurrent requests, and a large
body its part of the memory of all bodies. At this rate, a body of 32 MiB takes 34 minutes."""


def add_middleware(
    api: FastAPI,
    options: ServerOptions,
    api_key_digests: Sequence[bytes],
    request_counts: memoryview | None = None,
    worker_index: int = 0,
) -> ASGIApp:
    """Return `api` behind the middleware that `options` ask for; a request passes the last one first.

    `request_counts` has the POST requests that each API worker serves, int32, in memory that all of them share. By default,
    there is one worker.
    """

    def max_body_bytes() -> int:
        if (info := api.state.client.info) is None:
            return options.max_body_size or MAX_BODY_BYTES
        return RequestLimits.of(info, options.max_body_size).max_body_bytes

    app: ASGIApp = RequestLimitMiddleware(
        api, max_body_bytes, options.max_concurrent_requests, request_counts=request_counts, worker_index=worker_index
    )
    if api_key_digests:
        app = ApiKeyMiddleware(app, api_key_digests, api.state.public_paths)
    if options.cors_origin:
        methods, headers = ["*"], ["*"]
        exposed = ["X-Request-Id", "Request-Id", "Retry-After"]
        app = CORSMiddleware(app, options.cors_origin, methods, headers, expose_headers=exposed)
    app = OriginMiddleware(app, options.cors_origin)
    if options.allowed_hosts and "*" not in options.allowed_hosts:
        app = HostMiddleware(app, options.allowed_hosts)
    return RequestLogMiddleware(app)


class ApiKeyMiddleware:
    """Authenticates API keys by their SHA-256. All digests are compared, in constant time."""

    def __init__(self, app: ASGIApp, digests: Sequence[bytes], public_paths: PublicPaths) -> None:
        self._app, self._digests, self._public_paths = app, digests, public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] in self._public_paths or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            message = "A valid API key is required, as the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            headers = {"WWW-Authenticate": "Bearer"}
            await ApiError(401, message, code="invalid_api_key", headers=headers).send(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), key if scheme.lower() == "bearer" else ""]
        digests = [hashlib.sha256(each.strip().encode("latin-1")).digest() for each in given]
        return bool(sum([hmac.compare_digest(digest, known) for digest in digests for known in self._digests]))


class RequestLimitMiddleware:
    """Limits the size of bodies, the time between their parts, and the number of concurrent POST requests.

    `body_timeout_s` is also the time after which the mean rate of a body is checked.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: Callable[[], int],
        max_requests: int | None,
        body_timeout_s: float = BODY_TIMEOUT_S,
        request_counts: memoryview | None = None,
        worker_index: int = 0,
    ) -> None:
        self._app, self._max_body_bytes, self._max_requests = app, max_body_bytes, max_requests
        self._body_timeout_s = body_timeout_s
        self._counts, self._index = request_counts or memoryview(bytearray(4)).cast("i"), worker_index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 408, 413 or 429."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = Headers(scope=scope).get("content-length")
        is_post = scope["method"] == "POST"
        send = _drain_refused_body(receive, send)
        max_bytes = self._max_body_bytes()
        if length is not None and int(length) > max_bytes:
            too_large = body_too_large(f"is larger than {max_bytes} bytes (--max-body-size)")
            return await too_large.send(scope, receive, send)
        self._counts[self._index] += is_post  # before the check, so that two workers cannot both admit the last request
        if is_post and self._max_requests is not None and sum(self._counts) > self._max_requests:
            self._counts[self._index] -= 1  # at once, as the client may not read the refusal
            message = (
                f"{self._max_requests} requests are being served, the maximum at a time (--max-concurrent-requests)."
            )
            return await ApiError(429, message, code="too_many_requests").send(scope, receive, send)
        try:
            await self._app(scope, self._limited(receive, max_bytes), send)
        finally:
            self._counts[self._index] -= is_post

    def _limited(self, receive: Receive, max_bytes: int) -> Receive:
        """Return `receive` with a timeout and a limit on the received bytes, as chunked bodies do not declare their length."""
        num_bytes, is_complete, started_s = 0, False, time.monotonic()

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_complete
            timeout_s = self._body_timeout_s
            allowed_s = timeout_s + num_bytes / MIN_BODY_BYTES_PER_S - (time.monotonic() - started_s)
            try:
                async with asyncio.timeout(None if is_complete else min(timeout_s, max(allowed_s, 0.0))):
                    message = await receive()
            except TimeoutError:
                why = (
                    f"The body is not complete: nothing was received for {timeout_s:g} s, or less than {MIN_BODY_BYTES_PER_S}"
                    " bytes per second."
                )
                close = {"Connection": "close"}
                raise ApiError(408, why, code="body_timeout", headers=close) from None
            num_bytes += len(message.get("body", b""))
            is_complete = is_complete or not message.get("more_body")
            if num_bytes > max_bytes:
                raise body_too_large(f"is larger than {max_bytes} bytes (--max-body-size)")
            return message

        return receive_limited


def _drain_refused_body(receive: Receive, send: Send) -> Send:
    """Return a `send` that ends a refusal only when the refused body has been drained, or after `_LINGER_S`."""
    is_refused = False

    def send_and_drain(message: Message) -> Awaitable[None]:
        # Not a coroutine, as it is called for each chunk.
        nonlocal is_refused
        if message["type"] == "http.response.start":
            is_refused = message["status"] in (413, 429) and (b"connection", b"close") in message["headers"]
        elif is_refused and not message.get("more_body"):
            return drain_and_end(message)
        return send(message)

    async def drain_and_end(message: Message) -> None:
        await send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body"})

    return send_and_drain
