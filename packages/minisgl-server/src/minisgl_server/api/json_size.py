"""The size of a JSON text, counted before anything is made of it."""

from __future__ import annotations

from minisgl_server.api.errors import too_large
from minisgl_server.api.limits import RequestLimits

_ESCAPED = 6
"""Bytes that an escape such as ``\\u0061`` takes for one of a text."""
_NO_VALUE = bytes(byte for byte in range(256) if byte not in b",:[{")
"""Bytes that begin no value."""


class JsonSize:
    """Counts a body's values and the length of its longest text, piece by piece.

    A body that a parser would refuse is counted right up to where it is wrong, and no parser reads on from there.

    Attributes:
        num_values: values and keys so far.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.num_values = 0
        self._text_bytes = 0
        """Of the text that the piece before ended in."""
        self._is_in_text = False
        self._carry = b""

    def add(self, piece: bytes) -> None:
        """Count the next piece; pieces are much smaller than the longest text.

        Raises:
            ApiError: 413, there are too many values, or a text is too long.
        """
        piece = self._carry + piece
        self._carry = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            if piece.endswith(b"\\"):
                piece, self._carry = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._is_in_text :: 2])
        self.num_values += len(outside.translate(None, _NO_VALUE))
        self._is_in_text ^= len(parts) % 2 == 0
        if not self._is_in_text:
            self._text_bytes = 0
        else:
            self._text_bytes = len(parts[-1]) + (self._text_bytes if len(parts) == 1 else 0)
        if self.num_values > self._limits.values:
            raise too_large(f"holds more than {self._limits.values} values. Send fewer prompts at once")
        if self._text_bytes > _ESCAPED * self._limits.text:
            raise too_large(f"has a text of more than {self._limits.text} characters, which do not fit the context")
