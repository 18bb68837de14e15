"""Limit on the memory of prompts that wait: a tokenizer worker tokenizes one long prompt at a time."""

from collections.abc import Mapping

from minisgl_server.api.errors import ApiError

MAX_WAITING_BYTES = 128 * 2**20
"""Bytes of waiting prompts beyond which requests above `GUARANTEED_BYTES` are refused."""
GUARANTEED_BYTES = 2**20
"""Bytes that each request may have, however many others wait."""


class WaitingPrompts:
    """Counts the bytes of the prompts that have no output yet."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0

    def add(self, sizes: Mapping[str, int]) -> None:
        """Count the prompts of one request, with their sizes in bytes by id; raise 429 if it is large and too many bytes wait."""
        num_bytes = sum(sizes.values())
        if num_bytes > GUARANTEED_BYTES and self._num_bytes > MAX_WAITING_BYTES:
            message = (
                f"The waiting prompts have {self._num_bytes} bytes, more than the limit of {MAX_WAITING_BYTES}. Send the request"
                f" again later, or one of at most {GUARANTEED_BYTES} bytes."
            )
            raise ApiError(429, message, code="too_many_requests")
        self._sizes |= sizes
        self._num_bytes += num_bytes

    def remove(self, request_id: str) -> None:
        """Remove the prompt of a request that has output or has ended. May be called twice."""
        self._num_bytes -= self._sizes.pop(request_id, 0)
