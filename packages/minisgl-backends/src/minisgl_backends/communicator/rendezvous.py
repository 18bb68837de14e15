"""Rendezvous of the ranks of a group, and exchange of small objects before the devices are connected."""

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from minisgl_core.contracts.communicator import CommunicatorSpec


class Rendezvous:
    """A key-value store that all ranks share, and collectives of JSON objects over it; tuples arrive as lists.

    The store is at ``spec.init_method``: ``tcp://host:port``, or ``file:///path`` of a file that does not exist yet.

    Attributes:
        store: torch.distributed's store, for process groups.
    """

    def __init__(self, spec: CommunicatorSpec) -> None:
        timeout = timedelta(seconds=spec.timeout_s)
        self._rank, self._size = spec.rank, spec.size
        self.store, _, _ = next(torch_rendezvous(spec.init_method, spec.rank, spec.size, timeout=timeout))
        self.store.set_timeout(timeout)
        self._num_rounds = 0

    def broadcast(self, value: object) -> Any:
        """Return rank 0's value on every rank.

        Raises:
            RuntimeError: rank 0 did not send it within the timeout.
        """
        key = self._next_key()
        if self._rank == 0:
            self.store.set(key, json.dumps(value))
        return json.loads(self.store.get(key))

    def gather(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order. It is a barrier: it returns once all ranks have called it.

        Raises:
            RuntimeError: a rank did not call it within the timeout.
        """
        key = self._next_key()
        self.store.set(f"{key}/{self._rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self._size)]

    def final_barrier(self, timeout_s: float) -> None:
        """Wait until all ranks have called this, but at most `timeout_s` for each of them, without an error."""
        self.store.set_timeout(timedelta(seconds=timeout_s))
        with suppress(RuntimeError):
            self.gather(None)

    def _next_key(self) -> str:
        self._num_rounds += 1
        return f"object/{self._num_rounds}"
