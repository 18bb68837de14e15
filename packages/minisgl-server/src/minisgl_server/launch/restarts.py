"""Waits for the processes of a server, and restarts failed ones after an exponential backoff."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl_core.errors import WorkerDiedError
from minisgl_core.runtime.ipc import IpcAddresses
from minisgl_core.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

MAX_DELAY_S = 60.0
SERVED_S = 60.0
"""Time that a process must have served for its earlier failures to be forgotten."""
MAX_FAILURES = 3
"""Failures in a row after which a process counts as one that cannot start. Requests are refused earlier: as soon as each replica
has failed twice in a row; see `Replicas.handle_failure`."""


@dataclass(slots=True)
class Backoff:
    """Exponential backoff: no delay after the first failure, then 1, 2, 4, ... seconds, and at most `MAX_DELAY_S`.

    `num_failures` counts failures without `SERVED_S` of service in between.
    """

    num_failures: int = 0

    def delay_s(self, served_s: float) -> float:
        """Return the delay before the restart of a process that has failed, and had served for `served_s`."""
        self.num_failures = 1 if served_s >= SERVED_S else self.num_failures + 1
        return 0.0 if self.num_failures == 1 else min(2.0 ** min(self.num_failures - 2, 10), MAX_DELAY_S)


class RestartableProcesses(ABC):
    """Base class of `ApiWorkers` and `Replicas`: processes, or groups of processes, by index. Failed ones are restarted."""

    def __init__(self, supervisor: Supervisor, addresses: IpcAddresses, num: int) -> None:
        self._supervisor, self._addresses, self._num = supervisor, addresses, num
        self.backoffs: defaultdict[int, Backoff] = defaultdict(Backoff)
        self.due_s: dict[int, float] = {}
        """Time of the scheduled restart, by index; processes that run have none."""

    def start(self) -> None:
        """Start all, and return without waiting for them."""
        for index in range(self._num):
            self.start_one(index)

    @abstractmethod
    def start_one(self, index: int) -> None:
        """Start the process or group with this index, also for the first time."""

    @abstractmethod
    def handle_failure(self, error: WorkerDiedError) -> bool:
        """Schedule the restart of the process that `error` names. Return False if the server must end instead."""

    def check(self) -> None:
        """Note which processes are ready; called after each event of a process."""

    def restart_later(self, index: int, name: str, served_s: float, error: WorkerDiedError) -> None:
        """Schedule a restart after the backoff."""
        delay_s = self.backoffs[index].delay_s(served_s)
        failures = self.backoffs[index].num_failures
        when = f" in {delay_s:g} s, since it has failed {failures} times in a row" if delay_s else ""
        logger.error("%s %s is restarted%s.", error, name, when)
        self.due_s[index] = time.monotonic() + delay_s

    def start_due(self) -> float:
        """Run the restarts that are due. Return the time of the next one, or infinity if none is scheduled."""
        now_s = time.monotonic()
        for index in [each for each, due_s in self.due_s.items() if due_s <= now_s]:
            del self.due_s[index]
            self.start_one(index)
        return min(self.due_s.values(), default=math.inf)


def wait_and_restart(
    supervisor: Supervisor,
    owners: Sequence[RestartableProcesses],
    until: Callable[[], bool],
    wake: Any,
    timeout_s: float = math.inf,
) -> bool:
    """Wait as `Supervisor.wait` does, and restart processes of `owners` that die meanwhile. Other deaths are raised."""

    def check() -> bool:
        for owner in owners:
            owner.check()
        return until()

    deadline_s = time.monotonic() + timeout_s
    while True:
        due_s = min(owner.start_due() for owner in owners)
        remaining_s = max(0.0, min(deadline_s, due_s) - time.monotonic())
        try:
            is_met = supervisor.wait(check, timeout_s=remaining_s, wake=wake)
        except WorkerDiedError as error:
            if not any(owner.handle_failure(error) for owner in owners):
                raise
            continue
        is_restart_due = due_s < deadline_s and due_s <= time.monotonic()
        if is_met or not is_restart_due:  # it was woken, or the time is over
            return is_met
