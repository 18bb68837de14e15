"""Bodies of requests, read and decompressed within the engine's limits."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.datastructures import Headers

from minisgl_server.api.errors import ApiError, too_large
from minisgl_server.api.json_size import JsonSize
from minisgl_server.api.limits import RequestLimits

_PIECE = 2**16
"""Bytes that are decompressed and counted at a time; at worst that takes a few milliseconds."""
_ALWAYS = 2**20
"""Bytes that a body may have whatever others have."""
_MOST_BODIES = 4
"""Bodies of the largest size that are read at a time."""
_JSON_TYPE = re.compile(r'application/(?:json|[\w.!#$&^-]+\+json)(?:\s*;\s*charset="?utf-?8"?)?', re.IGNORECASE)
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class BodyMemory:
    """Bytes of all bodies that are read or decoded at a time."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextmanager
    def share(self, limits: RequestLimits) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of one body, until it is done with.

        Raises:
            ApiError: 429, by the function: the body is large, and so are others.
        """
        most, own = _MOST_BODIES * limits.body_bytes, 0

        def add(num_bytes: int) -> None:
            nonlocal own
            own += num_bytes
            self._num_bytes += num_bytes
            if own > _ALWAYS and self._num_bytes > most:
                message = f"Bodies of {most} bytes are being read, as many as this server takes at a time."
                raise ApiError(429, message, code="too_many_requests", headers={"Connection": "close"})

        try:
            yield add
        finally:
            self._num_bytes -= own


async def read_body(request: Request, limits: RequestLimits, count: Callable[[int], None]) -> bytearray:
    """Read and decompress the body of a request, which should be JSON.

    Args:
        request: not read yet.
        limits: of the engine.
        count: is called with the size of each piece; see `BodyMemory.share`.

    Raises:
        ApiError: 400, it is not compressed as its header says; 413, it is too large; 415, its header does not say that it is
            JSON, or names another compression than gzip or deflate; 429, other bodies are large, too.
    """
    _check_type(request.headers)
    body, size = bytearray(), JsonSize(limits)
    async for piece in _pieces(request):
        if len(body) + len(piece) > limits.body_bytes:
            raise too_large(f"is larger than {limits.body_bytes} bytes (--max-body-size)")
        size.add(piece)
        count(len(piece))
        body += piece
    return body


def _check_type(headers: Headers) -> None:
    """Refuse what a page of another site may send without asking first: anything that does not say that it is JSON."""
    given = headers.get("content-type")
    if given is None and "origin" not in headers:
        return
    if not _JSON_TYPE.fullmatch((given or "").strip()):
        allowed = "The body must be JSON in UTF-8, and its header must say so: -H 'Content-Type: application/json'"
        raise ApiError(415, f"{allowed}, not {given!r:.100}.", code="unsupported_media_type")


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the decompressed body in small pieces; the event loop has its turn in between."""
    unpack = _unpacker(request.headers.get("content-encoding", "identity"))
    num_bytes = 0
    async for chunk in request.stream():
        for piece in unpack(chunk):
            yield piece
            num_bytes += len(piece)
            if num_bytes >= _PIECE:
                num_bytes = 0
                await asyncio.sleep(0)


def _unpacker(encoding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return a function that decompresses a body's chunks, of which the last one is empty."""
    name = encoding.strip().lower()
    if name == "identity":
        return lambda chunk: (chunk[place : place + _PIECE] for place in range(0, len(chunk), _PIECE))
    if name not in _WINDOW_BITS:
        message = f"The body's Content-Encoding is {encoding!r:.100}; it must be gzip, deflate or left out."
        raise ApiError(415, message, code="unsupported_media_type")
    return _Inflater(name)


class _Inflater:
    """Decompresses chunk by chunk."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stream = zlib.decompressobj(_WINDOW_BITS[name])

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        """Decompress a chunk; the last one is empty.

        Raises:
            ApiError: 400, the data are broken, or more than one compressed stream.
        """
        if not chunk and not self._stream.eof:
            raise self._broken("it ends too early")
        piece = b""
        while chunk or len(piece) == _PIECE:  # a full piece may not be all that was made of the input
            try:
                piece = self._stream.decompress(chunk, _PIECE)
            except zlib.error as error:
                raise self._broken(str(error)) from None
            if self._stream.unused_data:
                raise self._broken("something follows its end")
            if piece:
                yield piece
            chunk = self._stream.unconsumed_tail

    def _broken(self, why: str) -> ApiError:
        return ApiError(400, f"The body is not what {self._name} makes: {why}.", code="invalid_encoding")
