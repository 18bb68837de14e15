"""Reads request bodies within the engine's limits."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.datastructures import Headers

from minisgl_server.api.errors import ApiError, body_too_large
from minisgl_server.api.limits import RequestLimits

_GUARANTEED_BYTES = 2**20
"""Bytes that each body may have, however large the others are."""
_MAX_LARGE_BODIES = 4
"""Number of bodies of the maximum size that may be in memory at a time."""
_MAX_ESCAPE_BYTES = 6
"""Bytes of an escape such as ``\\u0061``, which may stand for one byte of the string."""
_NOT_STRUCTURAL = bytes(byte for byte in range(256) if byte not in b",:[{")
"""All bytes but those that precede a value."""
_JSON_TYPE = re.compile(r'application/(?:json|[\w.!#$&^-]+\+json)(?:\s*;\s*charset="?utf-?8"?)?', re.IGNORECASE)


class BodyMemory:
    """Counts the memory of all bodies and stored conversations that are being read or decoded."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextmanager
    def reserve(self, limits: RequestLimits) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of one body, until the end of the context; it raises 429 beyond the limit."""
        max_bytes, own = _MAX_LARGE_BODIES * limits.max_body_bytes, 0

        def add(num_bytes: int) -> None:
            nonlocal own
            own += num_bytes
            self._num_bytes += num_bytes
            if own > _GUARANTEED_BYTES and self._num_bytes > max_bytes:
                message = (
                    f"Bodies of {max_bytes} bytes are being read, the maximum of this API worker. Try again later."
                )
                raise ApiError(429, message, code="too_many_requests")

        try:
            yield add
        finally:
            self._num_bytes -= own


class JsonSizeCounter:
    """Counts the values of a JSON body and the bytes of its strings, chunk by chunk, without parsing it.

    Values are counted by the brackets, commas and colons outside of strings. The counts of invalid JSON are right up to the first
    error, which is as far as a parser reads. `num_values` includes the keys.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.num_values = 0
        self._text_bytes = 0
        """Length of the string that the last chunk ended in."""
        self._is_in_text = False
        self._carry = b""
        """Backslash at the end of the last chunk. The next chunk begins with the character that it escapes."""

    def add(self, chunk: bytes) -> None:
        """Count the next chunk; chunks are much smaller than the longest allowed string."""
        chunk = self._carry + chunk
        self._carry = b""
        if b"\\" in chunk:  # remove escaped backslashes and quotes, so that each other quote begins or ends a string
            chunk = chunk.replace(b"\\\\", b"")
            if chunk.endswith(b"\\"):
                chunk, self._carry = chunk[:-1], b"\\"
            chunk = chunk.replace(b'\\"', b"")
        parts = chunk.split(b'"')  # every other part is inside a string
        outside = b"".join(parts[self._is_in_text :: 2])
        self.num_values += len(outside.translate(None, _NOT_STRUCTURAL))
        self._is_in_text ^= len(parts) % 2 == 0
        if not self._is_in_text:
            self._text_bytes = 0
        else:
            self._text_bytes = len(parts[-1]) + (self._text_bytes if len(parts) == 1 else 0)
        if self.num_values > self._limits.max_values:
            raise body_too_large(f"has more than {self._limits.max_values} JSON values. Send fewer prompts at once")
        if self._text_bytes > _MAX_ESCAPE_BYTES * self._limits.max_chars:
            what = f"has a string of more than {self._limits.max_chars} characters, which cannot fit the context"
            raise body_too_large(what)


async def read_body(request: Request, limits: RequestLimits, add_bytes: Callable[[int], None]) -> bytearray:
    """Read the JSON body of a request; `add_bytes` is called with the size of each chunk, see `BodyMemory.reserve`.

    Raises:
        ApiError: 413, the body is too large; 415, it is compressed, or its Content-Type is not JSON; 429, too many bodies are
            large.
    """
    _check_headers(request.headers)
    body, json_size = bytearray(), JsonSizeCounter(limits)
    async for chunk in request.stream():
        json_size.add(chunk)
        try:
            add_bytes(len(chunk))
        except ApiError as error:
            error.headers["Connection"] = "close"  # the rest of the body may still come
            raise
        body += chunk
    return body


def _check_headers(headers: Headers) -> None:
    """Refuse compressed bodies, and types other than JSON, which pages of other sites may send without a CORS preflight."""
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        message = f"The Content-Encoding is {encoding!r:.100}; it must be left out."
        raise ApiError(415, message, code="unsupported_media_type")
    given = headers.get("content-type")
    if given is None and "origin" not in headers:
        return
    if not _JSON_TYPE.fullmatch((given or "").strip()):
        allowed = "The body must be JSON in UTF-8, sent with -H 'Content-Type: application/json'"
        raise ApiError(415, f"{allowed}, not {given!r:.100}.", code="unsupported_media_type")
