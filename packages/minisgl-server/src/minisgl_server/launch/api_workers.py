"""API workers of a server: starts the processes of the API server, and restarts one that dies."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from minisgl_core.errors import InvalidValueError, WorkerDiedError, WorkerRefusedError
from minisgl_core.protocol.messages import ApiRestarted, EngineInfo, NoReplica, Stop
from minisgl_core.runtime.ipc import IpcAddresses, Sender
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_server.launch.restarts import MAX_FAILURES, SERVED_S, RestartableProcesses
from minisgl_server.options import ServerOptions

RUN_API = "minisgl_server.api.server:run_api"


def check_api_workers(options: ServerOptions) -> None:
    """Refuse too few tokenizer workers, and stored responses, with several ``--api-workers``."""
    num = options.api_workers
    if options.num_tokenizers is not None and options.num_tokenizers < num:
        why = "Each API worker needs a tokenizer worker of its own."
        raise InvalidValueError("--num-tokenizers", options.num_tokenizers, f"at least --api-workers ({num})", why)
    if num > 1 and options.response_store_size:
        why = "Each API worker would have responses of its own, and a client cannot choose the worker."
        raise InvalidValueError("--response-store-size", options.response_store_size, "0 with --api-workers", why)


class ApiWorkers(RestartableProcesses):
    """Processes of the API server, which accept connections from one listening socket.

    Each has tokenizer workers of its own, so that output returns to the process with the client's connection. A restarted worker
    has a new id and address, so it gets no output of its predecessor's requests. Its tokenizer workers abort these.
    """

    def __init__(
        self,
        options: ServerOptions,
        digests: Sequence[bytes],
        supervisor: Supervisor,
        addresses: IpcAddresses,
        listener: socket.socket,
    ) -> None:
        super().__init__(supervisor, addresses, addresses.num_api_workers)
        self._options, self._digests, self._listener = options, digests, listener
        self.names = [f"api {index}" for index in range(self._num)] if self._num > 1 else ["api"]
        self._ids = list(range(self._num))
        self._started_s = [0.0] * self._num
        self._senders: dict[int, Sender] = {}
        self._last_broadcast: EngineInfo | NoReplica | Stop | None = None
        # An int32 per worker: its running POST requests. --max-concurrent-requests limits their sum.
        Path(addresses.request_counts_file).write_bytes(bytes(4 * self._num))

    def broadcast(self, message: EngineInfo | NoReplica | Stop) -> None:
        """Send a message to all workers, and later to those that are restarted."""
        self._last_broadcast = message
        for sender in self._senders.values():
            sender.send(message)

    def is_ready(self) -> bool:
        return self._supervisor.ready.keys() >= set(self.names)

    def drain(self) -> None:
        """Ask the workers to end after their running requests. From now on, none is restarted."""
        self.due_s.clear()
        for index in self._senders:
            self._supervisor.end(self.names[index])

    def have_ended(self) -> bool:
        return not any(self._supervisor.is_alive(self.names[index]) for index in self._senders)

    def close(self) -> None:
        """Close the sockets, after the workers have ended."""
        for sender in self._senders.values():
            sender.drop()

    def _fails_repeatedly(self, index: int) -> bool:
        """Return True if a worker has failed `MAX_FAILURES` times in a row, and has not served long since then."""
        has_served = index not in self.due_s and time.monotonic() - self._started_s[index] >= SERVED_S
        return self.backoffs[index].num_failures >= MAX_FAILURES and not has_served

    def start_one(self, index: int) -> None:
        addresses = self._addresses.of_api_worker(self._ids[index])
        self._started_s[index] = time.monotonic()
        self._supervisor.start(self.names[index], RUN_API, self._options, self._digests, addresses, self._listener)
        self._senders[index] = Sender(addresses.api_in)
        if self._last_broadcast is not None:
            self._senders[index].send(self._last_broadcast)

    def handle_failure(self, error: WorkerDiedError) -> bool:
        """Schedule a restart.

        The server ends instead if the worker is the only one, or the server is not ready. It also ends if all workers fail
        repeatedly, or if the user can correct the error.
        """
        if error.process not in self.names or isinstance(error, WorkerRefusedError):
            return False
        if self._num == 1 or self._last_broadcast is None:
            return False
        index = self.names.index(error.process)
        if all(map(self._fails_repeatedly, range(self._num))):
            return False
        self._supervisor.discard(error.process)
        self._senders.pop(index).drop()
        with open(self._addresses.request_counts_file, "r+b") as counts:
            os.pwrite(counts.fileno(), bytes(4), 4 * index)  # its requests have ended with it
        self._ids[index] += self._num
        for address in self._addresses.of_api_worker(index).own_tokenizer_in.values():
            with Sender(address) as tokenizer:
                tokenizer.send(ApiRestarted(self._ids[index]))
        self.restart_later(index, f"API worker {index}", time.monotonic() - self._started_s[index], error)
        return True
