"""Sockets between the processes of one server, or between the ranks of an `LLM`.

Every process that receives binds one PULL socket in the server's directory, and its senders connect PUSH sockets. Messages of
one sender arrive in order. The directory is made at the start, is accessible to its user only, and is removed at the end.
These file permissions are the only access control of Unix sockets. Ranks on other hosts have TCP sockets, see `curve`.

    api_in           <-- tokenizer workers of the API worker, launcher
    tokenizer_in[i]  <-- API server, scheduler of rank 0, launcher, router
    scheduler_in     <-- tokenizer workers or, with several replicas, the router
    RankPlacement.address  <-- scheduler of rank 0; for rank 0, the last pipeline stage

Each API worker has an `api_in` and tokenizer workers of its own.

With several replicas, tokenizer workers, launcher and schedulers send to `router_in`. The `IpcAddresses` of each engine have the
`scheduler_in` of that engine.

    router_in        <-- tokenizer workers, launcher, scheduler of rank 0 of each replica
    router_events    <-- scheduler of rank 0 of each replica

Queues are unbounded (high-water mark 0), except with `max_messages`: a bounded queue would let one slow reader block the
scheduler and all streams. The number of requests that the scheduler accepts limits their length. A closed socket delivers its
queue for up to `LINGER_MS`, so that a last message arrives and a dead peer does not delay the close.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import decoder, encode
from minisgl_core.runtime.curve import secure

M = TypeVar("M")
LINGER_MS = 1000
"""Time for which a closed socket delivers its queue."""
_LONGEST_NAME = "/engine-9999/rank-99"
"""Longest path of a socket in the directory: each replica's engine has a directory of its own for the sockets of its ranks."""
MAX_PATH_BYTES = 100
"""Maximum length of a Unix socket's path, in bytes. Linux allows 107, and macOS 103."""


@dataclass(frozen=True, slots=True)
class IpcAddresses:
    """Addresses of one server's sockets, and the path of a file in their directory. Plain data, passed to each process.

    Attributes:
        directory: directory of the sockets.
        num_replicas: number of replicas; if there are several, they are behind a router.
        engine_id: id of the engine that this is for (`EngineInfo.engine_id`); a restarted replica is a new engine, so no message
            to the old one reaches it.
        num_api_workers: number of API workers, the processes of the API server.
        api_worker_id: id of the API worker that this is for (`ApiRestarted.api_worker_id`); one that is restarted has a new id.
    """

    directory: str
    num_tokenizers: int = 1
    num_replicas: int = 1
    engine_id: int = 0
    num_api_workers: int = 1
    api_worker_id: int = 0

    @classmethod
    def create(cls, num_tokenizers: int = 1, num_replicas: int = 1, num_api_workers: int = 1) -> IpcAddresses:
        """Make a new directory with mode 0700 in the system's temporary directory. Call `remove` at the end.

        Raises:
            InvalidValueError: ``TMPDIR`` cannot be written, or its path is too long for sockets.
        """
        try:
            directory = tempfile.mkdtemp(prefix="minisgl-")
        except OSError as error:
            given = os.environ.get("TMPDIR", "")
            raise InvalidValueError("TMPDIR", given, "a directory that can be written", f"{error.strerror}.") from None
        if len(directory.encode()) + len(_LONGEST_NAME) > MAX_PATH_BYTES:
            Path(directory).rmdir()
            allowed = "a shorter path, because Unix sockets are made there"
            raise InvalidValueError("TMPDIR", tempfile.gettempdir(), allowed, "Try TMPDIR=/tmp.")
        return cls(directory, num_tokenizers, num_replicas, num_api_workers=num_api_workers)

    def remove(self) -> None:
        """Delete the directory. May be called twice."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def of_engine(self, engine_id: int) -> IpcAddresses:
        """Return the addresses for another engine of the server."""
        return replace(self, engine_id=engine_id)

    def of_api_worker(self, api_worker_id: int) -> IpcAddresses:
        """Return the addresses for another API worker of the server."""
        return replace(self, api_worker_id=api_worker_id)

    @property
    def api_worker_index(self) -> int:
        """Index of the API worker, which stays when the worker is restarted."""
        return self.api_worker_id % self.num_api_workers

    @property
    def api_in(self) -> str:
        """Address of the API worker."""
        return f"ipc://{self.directory}/api" + (f"-{self.api_worker_id}" if self.num_api_workers > 1 else "")

    @property
    def request_counts_file(self) -> str:
        """Path of a file that the API workers share: the number of requests that each serves, int32."""
        return f"{self.directory}/request-counts"

    @property
    def replica(self) -> int:
        """Index of the replica that the engine is."""
        return self.engine_id % self.num_replicas

    @property
    def scheduler_in(self) -> str:
        """Address of the scheduler of rank 0."""
        return f"ipc://{self.directory}/scheduler" + (f"-{self.engine_id}" if self.num_replicas > 1 else "")

    @property
    def router_in(self) -> str:
        """Address for requests: of the router, or of the scheduler if there is only one replica."""
        return f"ipc://{self.directory}/router" if self.num_replicas > 1 else self.scheduler_in

    @property
    def router_events(self) -> str:
        """Address of the router for `CacheEvents`."""
        return f"ipc://{self.directory}/router-events"

    @property
    def scheduler_out(self) -> tuple[str, ...]:
        """Addresses that a scheduler answers to, by `Submit.worker`: the tokenizer workers and the router, if there is one."""
        return (*self.tokenizer_in, self.router_in) if self.num_replicas > 1 else self.tokenizer_in

    @property
    def tokenizer_in(self) -> tuple[str, ...]:
        """Addresses of the tokenizer workers."""
        return tuple(f"ipc://{self.directory}/tokenizer-{index}" for index in range(self.num_tokenizers))

    @property
    def own_tokenizer_in(self) -> dict[int, str]:
        """Addresses of the tokenizer workers of the API worker, by index."""
        return dict(list(enumerate(self.tokenizer_in))[self.api_worker_index :: self.num_api_workers])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Channel:
    """Socket with its own context, so that closing one never waits for another."""

    def __init__(self, kind: int, context: zmq.Context[Any], max_messages: int = 0) -> None:
        """Create a socket whose queue holds `max_messages` messages; 0 for no limit."""
        self._context = context
        self.socket: Any = context.socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, max_messages)
        self.socket.setsockopt(zmq.RCVHWM, max_messages)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._authenticator: ThreadAuthenticator | None = None

    def _connect(self, address: str) -> None:
        self.socket.connect(secure(self.socket, address, accepts=False)[0])

    def _bind(self, address: str) -> None:
        address, self._authenticator = secure(self.socket, address, accepts=True)
        try:
            self.socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket after delivering its queue for up to `LINGER_MS`. May be called twice."""
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sender(_Channel):
    """Sender of messages to one address. It never blocks if its queue is unlimited, and the peer may start later."""

    def __init__(self, address: str, max_messages: int = 0) -> None:
        super().__init__(zmq.PUSH, zmq.Context(), max_messages)
        self._connect(address)

    def send(self, message: msgspec.Struct, wait: bool = True) -> None:
        """Queue one message. Without `wait`, this raises zmq.Again if the queue is full."""
        self.socket.send(encode(message), 0 if wait else zmq.NOBLOCK)

    def drop(self) -> None:
        """Close the socket without delivering its queue."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.close()

    def reconnect(self, address: str) -> None:
        """Connect to another address, and drop what could not be delivered to the one before it."""
        max_messages = self.socket.getsockopt(zmq.SNDHWM)
        self.drop()
        super().__init__(zmq.PUSH, zmq.Context(), max_messages)
        self._connect(address)


class Receiver(_Channel, Generic[M]):
    """Receiver of messages of one type or union: ``Receiver[Submit | Abort](address, Submit | Abort)``."""

    def __init__(self, address: str, kind: Any, max_messages: int = 0) -> None:
        super().__init__(zmq.PULL, zmq.Context(), max_messages)
        self._decode = decoder(kind)
        self._bind(address)

    def receive(self, timeout_s: float | None = None) -> M | None:
        """Wait for the next message; return None after `timeout_s`. A timeout of None waits forever, 0 does not wait."""
        if timeout_s is not None and not self.socket.poll(round(timeout_s * 1000)):
            return None
        return self._decode(self.socket.recv())  # type: ignore[no-any-return]

    def drain(self) -> list[M]:
        """Return all messages that have arrived, without waiting."""
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
        self._decode = decoder(kind)
        self._bind(address)

    async def receive(self) -> M:
        """Wait for the next message."""
        return self._decode(await self.socket.recv())  # type: ignore[no-any-return]


def send_all(senders: Iterable[Sender], message: msgspec.Struct) -> None:
    """Send one message to several addresses, encoded once."""
    data = encode(message)
    for sender in senders:
        sender.socket.send(data)
