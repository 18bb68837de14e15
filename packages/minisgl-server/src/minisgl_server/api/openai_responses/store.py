"""Store of responses, for ``previous_response_id`` and ``GET /v1/responses/{response_id}``."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minisgl_server.api.errors import ApiError

MAX_RESPONSES = 10_000
_OVERHEAD_BYTES = 500
"""Estimated memory of an entry's Python objects, beside the contents."""


class StoredResponse(msgspec.Struct, frozen=True):
    """Stored response, its input items, and its whole conversation as chat messages with the output last, all as JSON."""

    body: bytes
    items: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        """Memory of the entry."""
        return len(self.body) + len(self.items) + len(self.messages) + _OVERHEAD_BYTES


class ResponseStore:
    """LRU store of at most `MAX_RESPONSES` responses and `max_bytes` bytes; 0 bytes disable it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.is_enabled = max_bytes, max_bytes > 0
        self._num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, body: dict[str, Any], items: bytes, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Store a response, evicting the least recently used ones. Return False if it is larger than the store."""
        entry = StoredResponse(msgspec.json.encode(body), items, msgspec.json.encode(messages))
        if entry.num_bytes > self._max_bytes:
            return False
        self._entries[body["id"]] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes or len(self._entries) > MAX_RESPONSES:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= dropped.num_bytes
        return True

    def get(self, response_id: str, is_previous: bool = False) -> StoredResponse:
        """Return a response. If there is none, raise 404, or 400 if the id is a request's ``previous_response_id``."""
        if response_id not in self._entries:
            message = (
                f"There is no response {response_id[:80]!r}: it was not stored (store), was deleted, or was evicted by newer "
                "ones (--response-store-size)."
            )
            if is_previous:
                raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
            raise ApiError(404, message, "response_id", "response_not_found")
        self._entries.move_to_end(response_id)
        return self._entries[response_id]

    def delete(self, response_id: str) -> None:
        """Delete a response; raise status 404 if there is none of this id."""
        self._num_bytes -= self.get(response_id).num_bytes
        del self._entries[response_id]
