"""uvicorn's HTTP protocol with limits that apply before a request reaches the application.

A client that has not sent complete headers has passed no middleware, so it is not authenticated. The cost of such
clients is limited here: number, size and time of headers, trailers, chunk extensions, pipelined requests and connections.
A connection whose client does not read its response is closed, too. Nothing here runs per chunk of a response.
"""

import asyncio
from http import HTTPStatus
from typing import ClassVar, cast

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl_server.api.errors import ApiError
from minisgl_server.api.http.connection_limits import ConnectionLimits

MAX_HEADERS = 100
"""Maximum number of headers and trailers per request."""
MAX_HEADER_BYTES = 64 * 2**10
"""Maximum bytes of the request line and headers. It also limits other bytes outside a body, such as chunk extensions."""
MAX_PIPELINED = 16
"""Maximum number of requests per connection that wait for the response to an earlier one."""
_SLICE_BYTES = 16 * 2**10
"""Bytes parsed at a time. The end of headers or of a body resets the count of unfinished bytes for the whole slice. So the count
may be too low by this much."""
_LINGER_S, _LINGER_BYTES = 1.0, 2**20
"""Limits of the input that is dropped after a refusal. Closing at once would reset the connection and lose the response."""


def limited_protocol_class(connections: ConnectionLimits) -> type[asyncio.Protocol]:
    """Return the protocol class of a server with these limits, for `uvicorn.Config`."""
    return cast(type[asyncio.Protocol], type("HttpProtocol", (LimitedHttpProtocol,), {"limits": connections}))


class LimitedHttpProtocol(HttpToolsProtocol):
    """Protocol of one connection."""

    limits: ClassVar[ConnectionLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start the timeout of its first request."""
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        self._is_refused = self._is_in_body = False
        # Bytes of incomplete headers, those of them that `limits` has counted, and bytes dropped after a refusal.
        self._num_unfinished_bytes = self._num_counted_bytes = self._num_dropped_bytes = 0
        self._refusal: ApiError | None = None
        """Error for which a callback of the parser ended parsing."""
        self._timer: asyncio.TimerHandle | None = None
        """Timeout of the headers or, after a refusal, of the connection."""
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        """Bytes that the client had not read when the write timer was started."""
        self._running_cycle: RequestResponseCycle | None = None
        """Request that the application handles, or the last one; `cycle` is the last pipelined request."""
        if error := self.limits.add(self._host, len(self.connections)):
            self._refuse(error)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Also tell the running request, as uvicorn tells the last pipelined request only."""
        if self._running_cycle is not None and not self._running_cycle.response_complete:
            self._running_cycle.disconnected = True
            self._running_cycle.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._stop_write_timer()
        self._count_unfinished_bytes(0)
        self.limits.remove_unread(self.transport)
        self.limits.remove(self._host)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read, and count what it has not read."""
        super().pause_writing()
        self._start_write_timer()
        self.limits.add_unread(self.transport, self._num_unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        self.limits.remove_unread(self.transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse malformed requests and those beyond the limits."""
        if self._is_refused:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        view = memoryview(data)
        try:
            for start in range(0, len(view), _SLICE_BYTES):
                self._parse(view[start : start + _SLICE_BYTES])
        except httptools.HttpParserError as error:
            malformed = ApiError(400, f"The request is not valid HTTP/1.1: {error}.", code="malformed_request")
            self._refuse(self._refusal or malformed)
            return
        self._count_unfinished_bytes(self._num_unfinished_bytes)
        if self._num_unfinished_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
        elif self._num_unfinished_bytes and self.limits.num_unfinished_bytes > self.limits.max_unfinished_bytes:
            message = f"All connections together have more than {self.limits.max_unfinished_bytes} bytes of incomplete headers."
            self._refuse(ApiError(503, message, code="too_many_unfinished_requests"))

    def _parse(self, data: memoryview) -> None:
        """Parse bytes. A request to switch protocols is handled like any other, and the bytes after it are the next request."""
        while data:
            self._num_unfinished_bytes += len(data)
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]

    # Callbacks of the parser; an exception in one of them ends parsing.

    def on_message_begin(self) -> None:
        """Start the timeout of the headers."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._abort_parsing(ApiError(429, f"More than {MAX_PIPELINED} requests wait on one connection."))
        self._unset_keepalive_if_required()
        if self._timer is None:
            self._start_timer()
        self._num_headers = self._num_header_bytes = 0
        self._is_in_body = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer. Trailers are dropped, as the application has already received the headers."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            message = f"The request has more than {MAX_HEADERS} headers."
            self._abort_parsing(ApiError(431, message, code="headers_too_large"))
        self._count_header_bytes(len(name) + len(value))
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unfinished_bytes, self._is_in_body = 0, True
        self._stop_timer()
        # uvicorn has restarted its keep-alive timer if an earlier response ended after this request had begun.
        self._unset_keepalive_if_required()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unfinished_bytes = 0
        super().on_message_complete()

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._abort_parsing(_headers_too_large())

    def _abort_parsing(self, error: ApiError) -> None:
        self._refusal = error
        raise ValueError(error.message)

    def _count_unfinished_bytes(self, num_bytes: int) -> None:
        """Count `num_bytes` of incomplete headers of this connection in `limits`, instead of those counted before."""
        self.limits.num_unfinished_bytes += num_bytes - self._num_counted_bytes
        self._num_counted_bytes = num_bytes

    # Timeouts and refusals.

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.limits.headers_timeout_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # an earlier request of the connection still runs
        elif self._num_unfinished_bytes:
            seconds = self.limits.headers_timeout_s
            self._refuse(ApiError(408, f"The headers were not complete after {seconds:g} s.", code="headers_timeout"))
        else:
            self.transport.close()

    def _start_write_timer(self) -> None:
        self._num_unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self._time_out_write)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _time_out_write(self) -> None:
        """Close the connection, unless the client has read a part of the response since the timer was started."""
        if self.transport.get_write_buffer_size() < self._num_unsent:
            self._start_write_timer()
        else:
            self.limits.log_refused(self._host, "the client does not read its response")
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Send the error if no response of the application has begun, drop further input, and close the connection soon."""
        self.limits.log_refused(self._host, error.message)
        self._is_refused = True
        self.parser = None  # type: ignore[assignment]  # frees the headers that it holds
        self._count_unfinished_bytes(0)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or not self._end_current_request():
            self.transport.abort()
            return
        self.transport.write(_whole_response(error))
        if error.status == 503:  # at the limit of connections or memory, the connection does not linger
            self.transport.close()
        else:
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _end_current_request(self) -> bool:
        """End the request that is being received. Return False if its response has begun, or an earlier request still runs."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        if self.pipeline or cycle.response_started:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return True


def _headers_too_large() -> ApiError:
    message = f"The request line and headers have more than {MAX_HEADER_BYTES} bytes."
    return ApiError(431, message, code="headers_too_large")


def _whole_response(error: ApiError) -> bytes:
    body = msgspec.json.encode(error.body())
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    headers = {**error.headers, "Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
