"""Where the ranks of a group find each other before they can talk by the device."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from minisgl_core.contracts.communicator import CommunicatorSpec


class Meeting:
    """A key-value store that all ranks reach, and small JSON-like objects that go through it; tuples arrive as lists.

    The ranks meet at ``spec.init_method``: ``tcp://host:port``, or ``file:///path`` of a file that does not exist yet.

    Attributes:
        store: torch's, for those who need one.
    """

    def __init__(self, spec: CommunicatorSpec) -> None:
        timeout = timedelta(seconds=spec.timeout_s)
        self._rank, self._size = spec.rank, spec.size
        self.store, _, _ = next(rendezvous(spec.init_method, spec.rank, spec.size, timeout=timeout))
        self.store.set_timeout(timeout)
        self._num_rounds = 0

    def broadcast(self, value: object) -> Any:
        """Rank 0's value, on every rank.

        Raises:
            RuntimeError: rank 0 did not give one in time.
        """
        key = self._next_key()
        if self._rank == 0:
            self.store.set(key, json.dumps(value))
        return json.loads(self.store.get(key))

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, in rank order; so it returns once all ranks are here.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        key = self._next_key()
        self.store.set(f"{key}/{self._rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self._size)]

    def part(self, patience_s: float) -> None:
        """Meet for the last time: return once all ranks have come here, or `patience_s` seconds have passed without one."""
        self.store.set_timeout(timedelta(seconds=patience_s))
        with suppress(RuntimeError):
            self.gather(None)

    def _next_key(self) -> str:
        self._num_rounds += 1
        return f"object/{self._num_rounds}"
