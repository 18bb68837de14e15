"""uvicorn's HTTP protocol with bounds on what comes before a request reaches the application.

A client that has sent no whole request has brought no key, and no middleware has seen it. What such a client can cost is
bounded here: headers in number, bytes and time, trailers and chunk extensions, pipelined requests, and connections.
Nothing here runs per chunk of an answer.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import ClassVar, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl_server.api.connections import Connections
from minisgl_server.api.errors import ApiError

MAX_HEADERS = 100
"""Headers and trailers of one request."""
MAX_HEADER_BYTES = 64 * 2**10
"""Bytes of the request line and headers; also of bytes in a row that bring neither headers to an end nor a body on."""
MAX_PIPELINED = 16
"""Requests of one connection that wait for the answer to an earlier one."""
_SLICE_BYTES = 16 * 2**10
"""Bytes parsed at a time: no more of a second request's headers goes uncounted."""
_LINGER_S, _LINGER_BYTES = 1.0, 2**20
"""Input that is dropped after a refusal: a connection closed before would be reset, and the answer lost."""


def protocol_class(connections: Connections) -> type[asyncio.Protocol]:
    """Return the protocol of a server with these bounds, for `uvicorn.Config`."""
    return cast(type[asyncio.Protocol], type("HttpProtocol", (BoundedProtocol,), {"bounds": connections}))


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    bounds: ClassVar[Connections]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and begin to wait for its first request."""
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        self._is_refused = self._is_in_body = False
        self._num_pending = self._num_charged = 0
        self._refusal: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None
        if error := self.bounds.add(self._host, len(self.connections)):
            self._refuse(error)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what the connection counted for."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._charge(0)
        self.bounds.remove(self._host)

    def data_received(self, data: bytes) -> None:
        """Parse what came; refuse what is malformed or too much."""
        if self._is_refused:
            self._num_pending += len(data)
            if self._num_pending > _LINGER_BYTES:
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
        self._charge(self._num_pending)
        if self._num_pending > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
        elif self._num_pending and self.bounds.num_unfinished_bytes > self.bounds.max_unfinished_bytes:
            message = "Too many requests with unfinished headers are open."
            self._refuse(ApiError(503, message, code="too_many_unfinished_requests"))

    def _parse(self, data: memoryview) -> None:
        """Parse a part; a request to switch protocols is one like any other, and what follows it is the next."""
        while data:
            self._num_pending += len(data)
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]

    # Callbacks of the parser: an exception in one of them ends the parsing.

    def on_message_begin(self) -> None:
        """Start the time of a request."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(ApiError(429, f"More than {MAX_PIPELINED} requests wait on one connection."))
        self._unset_keepalive_if_required()
        if self._timer is None:
            self._start_timer()
        self._num_headers = self._num_header_bytes = 0
        self._is_in_body = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer; trailers are dropped, as the application has seen the headers."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._stop(ApiError(431, f"The request has more than {MAX_HEADERS} headers.", code="headers_too_large"))
        self._count_header_bytes(len(name) + len(value))
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time of the headers."""
        self._num_pending, self._is_in_body = 0, True
        self._stop_timer()
        self._unset_keepalive_if_required()  # an earlier answer ended after this request had begun
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note that the body goes on."""
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is whole."""
        self._num_pending = 0
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def _count_header_bytes(self, number: int) -> None:
        self._num_header_bytes += number
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._stop(_headers_too_large())

    def _stop(self, error: ApiError) -> None:
        self._refusal = error
        raise ValueError(error.message)

    def _charge(self, number: int) -> None:
        self.bounds.num_unfinished_bytes += number - self._num_charged
        self._num_charged = number

    # Time and refusals.

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.bounds.head_timeout_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # an earlier request of the connection still runs
        elif self._num_pending:
            seconds = self.bounds.head_timeout_s
            self._refuse(ApiError(408, f"The headers were not whole after {seconds:g} s.", code="headers_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer where no answer of the application is on its way, take nothing more, and close the connection soon."""
        self.bounds.log_refused(self._host, error.message)
        self._is_refused = True
        self.parser = None  # type: ignore[assignment]  # with the headers that it holds
        self._charge(0)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or not self._ends_cycles():
            self.transport.abort()
            return
        self.transport.write(_whole_response(error))
        if error.status == 503:
            self.transport.close()
        else:
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _ends_cycles(self) -> bool:
        """End the request that is being received. False if an answer has begun or an earlier request still runs."""
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
