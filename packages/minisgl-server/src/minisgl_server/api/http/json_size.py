"""Counts the values and the longest string of a JSON text before it is decoded."""

from minisgl_server.api.errors import body_too_large
from minisgl_server.api.limits import RequestLimits

_MAX_ESCAPE_BYTES = 6
"""Bytes of an escape such as ``\\u0061``, which may stand for one byte of the string."""
_NOT_STRUCTURAL = bytes(byte for byte in range(256) if byte not in b",:[{")
"""All bytes but those that precede a value."""


class JsonSizeCounter:
    """Counts the values of a body and the length of its longest string, piece by piece.

    The counts of invalid JSON are right up to the first error, which is as far as a parser reads.

    Attributes:
        num_values: number of values and keys so far.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.num_values = 0
        self._text_bytes = 0
        """Length of the string that the last piece ended in."""
        self._is_in_text = False
        self._carry = b""

    def add(self, piece: bytes) -> None:
        """Count the next piece; pieces are much smaller than the longest allowed string."""
        piece = self._carry + piece
        self._carry = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            if piece.endswith(b"\\"):
                piece, self._carry = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        parts = piece.split(b'"')
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
            raise body_too_large(
                f"has a string of more than {self._limits.max_chars} characters, which cannot fit the context"
            )
