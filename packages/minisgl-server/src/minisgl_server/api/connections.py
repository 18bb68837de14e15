"""Bounds on connections, and a log of what was refused before it was a request."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network

from minisgl_server.api.errors import ApiError

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class Connections:
    """Counts the connections of one server and refuses those beyond its bounds.

    Attributes:
        max_total: connections at a time.
        max_per_address: connections at a time from one address that is not this host's own.
        head_timeout_s: longest time until a request's headers are whole.
        max_unfinished_bytes: bytes of unfinished headers that all connections may hold together.
        num_unfinished_bytes: bytes that they hold now.
    """

    max_total: int
    max_per_address: int
    head_timeout_s: float = 20.0
    max_unfinished_bytes: int = 64 * 2**20
    num_unfinished_bytes: int = 0
    _per_address: Counter[str] = field(default_factory=Counter)
    _num_refused: int = 0
    _next_log_s: float = 0.0

    def add(self, host: str, total: int) -> ApiError | None:
        """Count a connection; the result is the answer to one that is too many, which counts all the same.

        Args:
            host: IP address of the client; empty for none.
            total: connections that are open, this one included.
        """
        if (counted := _counted_address(host)) is not None:
            self._per_address[counted] += 1
        if total > self.max_total:
            message = f"{self.max_total} connections are open, as many as this server takes."
            return ApiError(503, message, code="too_many_connections")
        if counted is not None and self._per_address[counted] > self.max_per_address:
            message = (
                f"{self.max_per_address} connections from {counted} are open, as many as this server takes from one"
                " address (--max-connections-per-address)."
            )
            return ApiError(429, message, code="too_many_connections")
        return None

    def remove(self, host: str) -> None:
        """Take back what `add` counted."""
        if (counted := _counted_address(host)) is not None:
            self._per_address[counted] -= 1
            if not self._per_address[counted]:
                del self._per_address[counted]

    def log_refused(self, host: str, reason: str) -> None:
        """Log at debug level, at most one line per `_LOG_INTERVAL_S`."""
        self._num_refused += 1
        if logger.isEnabledFor(logging.DEBUG) and (now_s := time.monotonic()) >= self._next_log_s:
            logger.debug("refused %d malformed requests, the latest from %s: %s", self._num_refused, host, reason)
            self._num_refused, self._next_log_s = 0, now_s + _LOG_INTERVAL_S


def _counted_address(host: str) -> str | None:
    """Address that a connection counts for: an IPv6 client has a /64 network, and this host's own are not counted."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return None
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address)
