"""Minimal HTTP/1.1 client that passes on the bytes of a streamed response as they arrive.

A general-purpose client takes more CPU time per streamed request, and would limit the measurement earlier.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast

import httptools
import httpx

OnData = Callable[[bytes, float], None]
"""Called with bytes of a body and their time of arrival, of `time.perf_counter`."""


class HttpError(Exception):
    """Failure of a connection, or an invalid HTTP/1.1 response."""


def port_of(url: httpx.URL) -> int:
    """Return the TCP port of a URL."""
    return url.port or (443 if url.scheme == "https" else 80)


class HttpClient:
    """Client of one server; connections are kept alive between requests."""

    def __init__(self, url: httpx.URL, headers: Mapping[str, str]) -> None:
        """Create a client that sends `headers` with every request."""
        self.url = url
        fixed = {"Host": url.netloc.decode(), "Accept-Encoding": "identity", "Content-Type": "application/json"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {**fixed, **headers}.items())
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes, on_data: OnData) -> int:
        """Send a request to a path below the URL's; return the status. Pieces of the body are passed to `on_data`."""
        target = self.url.raw_path.decode().rstrip("/") + path
        request_headers = f"{method} {target} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        message = request_headers.encode("latin-1") + body
        while True:
            was_idle = bool(self._idle)
            connection = self._idle.pop() if was_idle else await self._connect()
            try:
                status = await connection.exchange(message, on_data)
            except BaseException as error:
                connection.close()
                if was_idle and isinstance(error, HttpError) and not connection.has_received:
                    continue  # the server closed the idle connection, and did not process the request
                raise
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return status

    async def _connect(self) -> "_Connection":
        create = asyncio.get_running_loop().create_connection
        try:
            return (await create(_Connection, self.url.host, port_of(self.url), ssl=self._tls))[1]
        except OSError as error:
            raise HttpError(f"cannot connect: {error.strerror or error}") from None

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """Connection with one request at a time. Methods without docstrings are callbacks of asyncio and of the parser."""

    def __init__(self) -> None:
        self.is_reusable = self.has_received = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_data: OnData = lambda data, now: None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._ends_with_connection = False

    async def exchange(self, message: bytes, on_data: OnData) -> int:
        """Send a request; return the status at the end of the response."""
        assert self._transport is not None
        self._on_data, self.has_received, self.is_reusable = on_data, False, False
        if self._transport.is_closing():
            raise HttpError("the connection was closed")
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()  # there is no request that this could answer
            return
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._done.done():
                self._done.set_exception(HttpError("the response is not HTTP/1.1"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None and self._ends_with_connection:
            self._done.set_result(self._parser.get_status_code())
        else:
            self._done.set_exception(HttpError("the connection was closed before the end of the response"))

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_body(self, data: bytes) -> None:
        self._on_data(data, self._now)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._done is not None:  # informational responses precede the final one
            self.is_reusable = self._parser.should_keep_alive()
            self._done.set_result(status)
