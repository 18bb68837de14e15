"""Limits on connections, and a log of connections and requests that were refused."""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network

from minisgl_server.api.errors import ApiError

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
_GUARANTEED_BYTES = 2**20
"""Bytes of its response that each connection may leave unread, however many others do."""


@dataclass(slots=True)
class ConnectionLimits:
    """Counts the connections of one API worker and refuses those beyond the limits.

    Attributes:
        max_per_address: maximum number of open connections per address; loopback addresses have no limit.
        headers_timeout_s: maximum time until a request's headers are complete.
        write_timeout_s: maximum time for which a client reads nothing of a response that is sent.
        max_unfinished_bytes: maximum bytes of incomplete headers over all connections.
        max_unread_bytes: maximum bytes of responses that clients have not read, over all connections.
    """

    max_total: int
    max_per_address: int
    headers_timeout_s: float = 20.0
    write_timeout_s: float = 300.0
    max_unfinished_bytes: int = 64 * 2**20
    num_unfinished_bytes: int = 0
    max_unread_bytes: int = 2**30
    _unread: dict[asyncio.Transport, int] = field(default_factory=dict)
    """Bytes of large responses that their clients have not read, longest wait first."""
    _per_address: Counter[str] = field(default_factory=Counter)
    _num_refused: int = 0
    _next_log_s: float = 0.0

    def add(self, host: str, total: int) -> ApiError | None:
        """Count a connection of a client, `total` of which are open now; return the error if it exceeds a limit.

        It is counted in either case. `host` is the client's IP address, or empty if there is none.
        """
        if (counted := _counted_address(host)) is not None:
            self._per_address[counted] += 1
        if total > self.max_total:
            message = f"{self.max_total} connections are open, the maximum of this API worker."
            return ApiError(503, message, code="too_many_connections")
        if counted is not None and self._per_address[counted] > self.max_per_address:
            message = (
                f"{self.max_per_address} connections from {counted} are open, the maximum per address"
                " (--max-connections-per-address)."
            )
            return ApiError(429, message, code="too_many_connections")
        return None

    def remove(self, host: str) -> None:
        """Undo the count of `add`."""
        if (counted := _counted_address(host)) is not None:
            self._per_address[counted] -= 1
            if not self._per_address[counted]:
                del self._per_address[counted]

    def add_unread(self, transport: asyncio.Transport, num_bytes: int) -> None:
        """Count a response that waits for its client. Beyond the limit, close the connections that have waited longest."""
        if num_bytes <= _GUARANTEED_BYTES:
            return
        self._unread[transport] = num_bytes
        total = sum(self._unread.values())
        while total > self.max_unread_bytes:
            longest = next(iter(self._unread))
            total -= self._unread.pop(longest)
            peer = longest.get_extra_info("peername")
            self.log_refused(str(peer), f"clients have not read {self.max_unread_bytes} bytes of responses")
            longest.abort()

    def remove_unread(self, transport: asyncio.Transport) -> None:
        """Undo the count of `add_unread`."""
        self._unread.pop(transport, None)

    def log_refused(self, host: str, reason: str) -> None:
        """Log a refused connection or request at debug level, with at most one line per `_LOG_INTERVAL_S`."""
        self._num_refused += 1
        if logger.isEnabledFor(logging.DEBUG) and (now_s := time.monotonic()) >= self._next_log_s:
            logger.debug("refused %d connections or requests, the latest from %s: %s", self._num_refused, host, reason)
            self._num_refused, self._next_log_s = 0, now_s + _LOG_INTERVAL_S


def _counted_address(host: str) -> str | None:
    """Return the address or IPv6 /64 network that a connection counts for; None for loopback addresses."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return None
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address)
