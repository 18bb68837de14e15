"""ZeroMQ connections between processes of the cluster, for what Serve's calls are too slow for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from minisgl_core.runtime.curve import new_key, tcp_address
from minisgl_core.runtime.ipc import AsyncReceiver, Sender

IDLE_S = 60.0
"""Time without users after which `Connections.close_idle` closes a connection."""


def open_receiver(kind: Any) -> tuple[AsyncReceiver[Any], str]:
    """Return a receiver of messages of type `kind` at a free port of this node, and its address, which is a secret."""
    address = tcp_address(ray.util.get_node_ip_address(), 0, new_key())
    receiver = AsyncReceiver[Any](address, kind)
    port = receiver.socket.last_endpoint.decode().rpartition(":")[2]
    return receiver, f"{address.rpartition(':')[0]}:{port}"


@dataclass(slots=True)
class _Connection:
    sender: Sender
    num_users: int = 0
    last_used_s: float = field(default_factory=time.monotonic)


class Connections:
    """Connections to receivers of other processes, by address."""

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}

    @contextmanager
    def use(self, address: str) -> Iterator[None]:
        """Keep the connection to `address` open."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(Sender(address))
        connection.num_users += 1
        try:
            yield
        finally:
            connection.num_users -= 1
            connection.last_used_s = time.monotonic()

    def sender(self, address: str) -> Sender:
        """Return the sender to an address that is in use, or was less than `IDLE_S` ago."""
        return self._connections[address].sender

    def senders(self) -> list[Sender]:
        """Return the senders to all addresses."""
        return [each.sender for each in self._connections.values()]

    def close_idle(self) -> None:
        """Close the connections that were not used for `IDLE_S`."""
        for address, each in list(self._connections.items()):
            if not each.num_users and time.monotonic() - each.last_used_s > IDLE_S:
                self._connections.pop(address).sender.drop()
