"""Sockets between the processes of one launch.

Every process that receives binds one PULL socket in the launch's directory; whoever has something to say to it connects
a PUSH socket. One sender's messages arrive in order. The directory is made for the launch, readable by its user alone,
and removed at its end: reaching the sockets takes the user's own rights, and that is all the access control there is.

    api_in           <-- tokenizer workers, launcher
    tokenizer_in[i]  <-- API server, scheduler of rank 0, launcher
    scheduler_in     <-- tokenizer workers, launcher
    RankPlacement.address  <-- scheduler of rank 0

Queues are unbounded (high-water mark 0): a bounded one would block the scheduler, and with it every stream, because one
reader is slow. What bounds them is the number of requests that the scheduler accepts. On close, what was sent is
delivered for `LINGER_MS` at most, so that a last message arrives and a peer that is gone holds nobody up.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec
import zmq
import zmq.asyncio

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import Decoder, encode

M = TypeVar("M")
LINGER_MS = 1000
MAX_PATH_BYTES = 100
"""A Unix socket's path holds 107 bytes; ``ipc://`` sockets need the whole of it to fit."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of one launch. Plain data, to hand to each process.

    Attributes:
        directory: holds the sockets.
        num_tokenizers: tokenizer workers.
    """

    directory: str
    num_tokenizers: int = 1

    @classmethod
    def create(cls, num_tokenizers: int = 1) -> Endpoints:
        """Make a fresh directory with mode 0700 under the system's temporary one; `remove` it at the end.

        Raises:
            InvalidValueError: ``TMPDIR`` is too long a path to hold sockets.
        """
        directory = tempfile.mkdtemp(prefix="minisgl-")
        if len(directory.encode()) + len("/tokenizer-999") > MAX_PATH_BYTES:
            Path(directory).rmdir()
            raise InvalidValueError(
                "TMPDIR",
                tempfile.gettempdir(),
                "a shorter path, as Unix sockets are made there",
                "Try TMPDIR=/tmp.",
            )
        return cls(directory, num_tokenizers)

    def remove(self) -> None:
        """Delete the directory; fine to call twice."""
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def api_in(self) -> str:
        """Where the API server receives."""
        return f"ipc://{self.directory}/api"

    @property
    def scheduler_in(self) -> str:
        """Where the scheduler of rank 0 receives."""
        return f"ipc://{self.directory}/scheduler"

    @property
    def tokenizer_in(self) -> tuple[str, ...]:
        """Where each tokenizer worker receives."""
        return tuple(f"ipc://{self.directory}/tokenizer-{index}" for index in range(self.num_tokenizers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Channel:
    """A socket with a context of its own, so that closing one never waits for another."""

    def __init__(self, kind: int, context: zmq.Context[Any]) -> None:
        self._context = context
        self.socket: Any = context.socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)

    def close(self) -> None:
        """Close; waits up to `LINGER_MS` for what was sent. Fine to call twice."""
        self.socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sender(_Channel):
    """Sends messages to one address. Never blocks: the peer need not be there yet."""

    def __init__(self, address: str) -> None:
        super().__init__(zmq.PUSH, zmq.Context())
        self.socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message."""
        self.socket.send(encode(message))


class Receiver(_Channel, Generic[M]):
    """Receives messages of one (union) type at an address: ``Receiver[Submit | Abort](address, Submit | Abort)``."""

    def __init__(self, address: str, kind: Any) -> None:
        super().__init__(zmq.PULL, zmq.Context())
        self._decode = Decoder(kind)
        self.socket.bind(address)

    def receive(self, timeout_s: float | None = None) -> M | None:
        """Wait for the next message; None after `timeout_s` without one (None waits forever, 0 only looks)."""
        if timeout_s is not None and not self.socket.poll(round(timeout_s * 1000)):
            return None
        return self._decode(self.socket.recv())  # type: ignore[no-any-return]

    def drain(self) -> list[M]:
        """All messages that have arrived, without waiting."""
        messages: list[M] = []
        while True:
            try:
                messages.append(self._decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages


class AsyncReceiver(_Channel, Generic[M]):
    """`Receiver` for asyncio."""

    def __init__(self, address: str, kind: Any) -> None:
        super().__init__(zmq.PULL, zmq.asyncio.Context())
        self._decode = Decoder(kind)
        self.socket.bind(address)

    async def receive(self) -> M:
        """Wait for the next message."""
        return self._decode(await self.socket.recv())  # type: ignore[no-any-return]


def send_all(senders: Iterable[Sender], message: msgspec.Struct) -> None:
    """Send one message to several addresses, packed once."""
    data = encode(message)
    for sender in senders:
        sender.socket.send(data)
