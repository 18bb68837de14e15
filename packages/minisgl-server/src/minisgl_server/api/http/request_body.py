"""Reads and decompresses request bodies within the engine's limits."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.datastructures import Headers

from minisgl_server.api.errors import ApiError, body_too_large
from minisgl_server.api.http.json_size import JsonSizeCounter
from minisgl_server.api.limits import RequestLimits

_PIECE_BYTES = 2**16
"""Bytes that are decompressed and counted at a time; this takes a few milliseconds at most."""
_GUARANTEED_BYTES = 2**20
"""Bytes that each body may have, however large the others are."""
_MAX_LARGE_BODIES = 4
"""Number of bodies of the maximum size that may be in memory at a time."""
_JSON_TYPE = re.compile(r'application/(?:json|[\w.!#$&^-]+\+json)(?:\s*;\s*charset="?utf-?8"?)?', re.IGNORECASE)
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class BodyMemory:
    """Counts the memory of all bodies and stored conversations that are being read or decoded."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextmanager
    def reserve(self, limits: RequestLimits) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of one body; they are released at the end of the context.

        Raises:
            ApiError: 429, raised by the function: this body and others are large.
        """
        max_bytes, own = _MAX_LARGE_BODIES * limits.max_body_bytes, 0

        def add(num_bytes: int) -> None:
            nonlocal own
            own += num_bytes
            self._num_bytes += num_bytes
            if own > _GUARANTEED_BYTES and self._num_bytes > max_bytes:
                message = f"Bodies of {max_bytes} bytes are being read, the maximum of this server at a time."
                raise ApiError(429, message, code="too_many_requests")

        try:
            yield add
        finally:
            self._num_bytes -= own


async def read_body(request: Request, limits: RequestLimits, add_bytes: Callable[[int], None]) -> bytearray:
    """Read and decompress the JSON body of a request.

    Args:
        add_bytes: called with the size of each piece; see `BodyMemory.reserve`.

    Raises:
        ApiError: 400, the compressed data are invalid; 413, the body is too large; 415, its Content-Type is not JSON, or its
            Content-Encoding is neither gzip nor deflate; 429, too many bodies are large.
    """
    _check_content_type(request.headers)
    body, json_size = bytearray(), JsonSizeCounter(limits)
    async for piece in _pieces(request):
        if len(body) + len(piece) > limits.max_body_bytes:
            raise body_too_large(f"is larger than {limits.max_body_bytes} bytes (--max-body-size)")
        json_size.add(piece)
        try:
            add_bytes(len(piece))
        except ApiError as error:
            error.headers["Connection"] = "close"  # the rest of the body may still come
            raise
        body += piece
    return body


def _check_content_type(headers: Headers) -> None:
    """Refuse content types other than JSON, which pages of other sites may send without a CORS preflight."""
    given = headers.get("content-type")
    if given is None and "origin" not in headers:
        return
    if not _JSON_TYPE.fullmatch((given or "").strip()):
        allowed = "The body must be JSON in UTF-8, sent with -H 'Content-Type: application/json'"
        raise ApiError(415, f"{allowed}, not {given!r:.100}.", code="unsupported_media_type")


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the decompressed body in small pieces; the event loop runs in between."""
    decompress = _decompressor(request.headers.get("content-encoding", "identity"))
    num_bytes = 0
    async for chunk in request.stream():
        for piece in decompress(chunk):
            yield piece
            num_bytes += len(piece)
            if num_bytes >= _PIECE_BYTES:
                num_bytes = 0
                await asyncio.sleep(0)


def _decompressor(encoding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return a function that decompresses the chunks of a body; the last chunk is empty."""
    name = encoding.strip().lower()
    if name == "identity":
        return lambda chunk: (chunk[start : start + _PIECE_BYTES] for start in range(0, len(chunk), _PIECE_BYTES))
    if name not in _WINDOW_BITS:
        message = f"The Content-Encoding is {encoding!r:.100}; it must be gzip, deflate or left out."
        raise ApiError(415, message, code="unsupported_media_type")
    return _inflater(name)


def _inflater(name: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return a function that decompresses a gzip or deflate stream chunk by chunk; the last chunk is empty."""
    stream = zlib.decompressobj(_WINDOW_BITS[name])

    def invalid(why: str) -> ApiError:
        return ApiError(400, f"The body is not valid {name} data: {why}.", code="invalid_encoding")

    def decompress(chunk: bytes) -> Iterator[bytes]:
        if not chunk and not stream.eof:
            raise invalid("it ends too early")
        piece = b""
        while chunk or len(piece) == _PIECE_BYTES:  # after a full piece, there may be more output without more input
            try:
                piece = stream.decompress(chunk, _PIECE_BYTES)
            except zlib.error as error:
                raise invalid(str(error)) from None
            if stream.unused_data:
                raise invalid("there is data after its end")
            if piece:
                yield piece
            chunk = stream.unconsumed_tail

    return decompress
