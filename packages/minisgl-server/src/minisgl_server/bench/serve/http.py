"""Just enough HTTP/1.1 to ask for a stream and hand on its bytes as they arrive.

A load generator must not be what it measures. General clients take tens of microseconds for each piece of a stream, which at
thousands of tokens a second is most of a core.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

OnData = Callable[[bytes, float], None]
"""Takes bytes of a body and when they arrived, in seconds of `time.perf_counter`."""


class HttpError(Exception):
    """The connection failed, or what came over it is no HTTP/1.1 response."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        host: name or address.
        port: TCP port.
        tls: whether to speak TLS.
        path: what the URLs of all requests begin with; no slash at the end.
    """

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """From a URL; raises ValueError where it is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class HttpClient:
    """Connections to one server, kept open between requests."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        """`headers` go with every request."""
        self.address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        fixed = {"Host": f"{host}:{address.port}", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {**fixed, **headers}.items())
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes, on_data: OnData) -> int:
        """Send a request and wait for the end of its response.

        Args:
            method: such as ``POST``.
            path: below the address's path.
            body: JSON; may be empty.
            on_data: called for each piece of the body.

        Returns:
            The status.

        Raises:
            HttpError: there was no whole response.
        """
        head = f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        message = head.encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, message, on_data)
            except HttpError:
                if connection.has_received:
                    raise
                # The server closed it while it was idle: nothing of the request was processed.
        try:
            loop = asyncio.get_running_loop()
            made = loop.create_connection(_Connection, self.address.host, self.address.port, ssl=self._tls)
            _, connection = await made
        except OSError as error:
            raise HttpError(f"cannot connect: {error.strerror or error}") from None
        return await self._exchange(connection, message, on_data)

    async def _exchange(self, connection: _Connection, message: bytes, on_data: OnData) -> int:
        try:
            status = await connection.exchange(message, on_data)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. The methods without docstrings are the protocol's and the parser's events."""

    def __init__(self) -> None:
        self.is_reusable = self.has_received = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_data: OnData = lambda data, now: None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._ends_with_connection = False

    async def exchange(self, message: bytes, on_data: OnData) -> int:
        """Send a request; the status, when the response has ended."""
        assert self._transport is not None
        self._on_data, self.has_received, self.is_reusable = on_data, False, False
        if self._transport.is_closing():
            raise HttpError("the connection was closed")
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._done

    def close(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()  # nobody asked
            return
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._done.done():
                self._done.set_exception(HttpError("the answer is not HTTP/1.1"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None and self._ends_with_connection:
            self._done.set_result(self._parser.get_status_code())
        else:
            self._done.set_exception(HttpError("the connection was closed before the answer's end"))

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_body(self, data: bytes) -> None:
        self._on_data(data, self._now)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._done is not None:  # those below only announce another one
            self.is_reusable = self._parser.should_keep_alive()
            self._done.set_result(status)
