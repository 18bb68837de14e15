"""What stands before the application: who may enter, how many, and with how much. Plain ASGI, at no cost a chunk."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_server.api.access import RequestLog
from minisgl_server.api.errors import ApiError, too_large
from minisgl_server.api.hosts import HostCheck, OriginCheck
from minisgl_server.api.limits import MAX_BODY_BYTES, limits_of
from minisgl_server.options import ServerOptions

_LINGER_S = 5.0
"""How long what a client still sends is read, and dropped, beside the answer that refuses it: a connection that was closed
before would be broken to a client that writes all before it reads."""
BODY_TIMEOUT_S = 60.0
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
OPEN_FOLDER = "/page/"
"""What needs no key: it tells nothing but that a server is there. The page's files are the same for everyone."""


def guarded(api: FastAPI, options: ServerOptions, key_digests: Sequence[bytes]) -> ASGIApp:
    """`api` behind everything that `options` ask for; a request passes the last one first."""

    def max_body_bytes() -> int:
        limits = limits_of(api)
        return (options.max_body_size or MAX_BODY_BYTES) if limits is None else limits.body_bytes

    app: ASGIApp = Limits(api, max_body_bytes, options.max_concurrent_requests)
    if key_digests:
        app = KeyCheck(app, key_digests)
    if options.cors_origin:
        methods, headers = ["*"], ["*"]
        exposed = ["X-Request-Id", "Retry-After"]
        app = CORSMiddleware(app, options.cors_origin, methods, headers, expose_headers=exposed)
    app = OriginCheck(app, options.cors_origin)
    if options.allowed_hosts and "*" not in options.allowed_hosts:
        app = HostCheck(app, options.allowed_hosts)
    return RequestLog(app)


class KeyCheck:
    """Lets in who brings a key.

    Args:
        app: what is protected.
        digests: SHA-256 of each key. Equal lengths, compared in constant time, each time all of them.
    """

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app, self._digests = app, digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or answer 401."""
        if scope["type"] == "lifespan" or is_open(scope["path"]) or self._knows(scope):
            await self._app(scope, receive, send)
        else:
            message = "A valid API key is required, as the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            response = ApiError(401, message, code="invalid_api_key").response(scope["path"])
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), key if scheme.lower() == "bearer" else ""]
        digests = [hashlib.sha256(each.strip().encode("latin-1")).digest() for each in given]
        return bool(sum([hmac.compare_digest(digest, known) for digest in digests for known in self._digests]))


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return (path.rstrip("/") or "/") in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class Limits:
    """Refuses bodies that are too large, before they are read, or do not come, and more requests at a time than wanted.

    Args:
        app: what is protected.
        max_body_bytes: tells the most of one request.
        max_requests: POST requests at a time; None for any number.
        body_timeout_s: longest wait for the next part of a body.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: Callable[[], int],
        max_requests: int | None,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app, self._max_body_bytes, self._max_requests = app, max_body_bytes, max_requests
        self._body_timeout_s = body_timeout_s
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or answer 408, 413 or 429."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = Headers(scope=scope).get("content-length")
        is_post = scope["method"] == "POST"
        send = _lingering(receive, send)
        max_bytes = self._max_body_bytes()
        if length is not None and int(length) > max_bytes:
            refusal = too_large(f"is larger than {max_bytes} bytes (--max-body-size)").response(scope["path"])
            return await refusal(scope, receive, send)
        if is_post and self._max_requests is not None and self._num_requests >= self._max_requests:
            message = f"{self._num_requests} requests are being served, as many as this server takes at a time."
            return await ApiError(429, message, code="too_many_requests").response(scope["path"])(scope, receive, send)
        self._num_requests += is_post
        try:
            await self._app(scope, self._checked(receive, max_bytes), send)
        finally:
            self._num_requests -= is_post

    def _checked(self, receive: Receive, max_bytes: int) -> Receive:
        """Counts what comes, as only the end of some bodies tells their length, and waits for it no longer than it should."""
        num_bytes, is_whole = 0, False

        async def checked() -> Message:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout(None if is_whole else self._body_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise self._too_late() from None
            num_bytes += len(message.get("body", b""))
            is_whole = is_whole or not message.get("more_body")
            if num_bytes > max_bytes:
                raise too_large(f"is larger than {max_bytes} bytes (--max-body-size)")
            return message

        return checked

    def _too_late(self) -> ApiError:
        """The connection ends with the answer."""
        return ApiError(
            408,
            f"Nothing came for {self._body_timeout_s:g} s, and the body is not whole.",
            code="body_timeout",
            headers={"Connection": "close"},
        )


def _lingering(receive: Receive, send: Send) -> Send:
    """`send`; an answer that refuses a body ends when the client has sent what it had, or `_LINGER_S` later."""
    is_refused = False

    async def send_and_linger(message: Message) -> None:
        nonlocal is_refused
        if message["type"] == "http.response.start":
            is_refused = message["status"] in (413, 429) and (b"connection", b"close") in message["headers"]
        elif is_refused and not message.get("more_body"):
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    while (await receive()).get("more_body"):
                        pass
            message = {"type": "http.response.body"}
        await send(message)

    return send_and_linger
