"""Queue of the requests without a page-table row."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from minisgl_core.scheduler.constraints import Constraint
from minisgl_core.scheduler.request import Request


def queue_key(request: Request) -> tuple[int, int]:
    """Return the sort key of the queue: priority, lowest value first, then arrival. The last request is preempted first."""
    return request.priority, request.arrival


class WaitingQueue:
    """Waiting requests. Those with a grammar can be admitted once it is compiled.

    Attributes:
        admissible: requests that can be admitted, in queue order; not to be changed.
    """

    def __init__(self) -> None:
        self.admissible: list[Request] = []
        self._compiling: dict[Constraint, Request] = {}
        self._compiled = SimpleQueue[Constraint]()
        """Constraints whose grammars are compiled, or whose compilation failed or was cancelled. Other threads add them."""

    def __len__(self) -> int:
        return len(self.admissible) + len(self._compiling)

    @property
    def is_compiling(self) -> bool:
        """True if a request waits for its grammar."""
        return bool(self._compiling)

    def all(self) -> Sequence[Request]:
        """Return all requests in queue order; not to be changed."""
        return (
            sorted((*self.admissible, *self._compiling.values()), key=queue_key) if self._compiling else self.admissible
        )

    def add(self, request: Request) -> None:
        """Add a request that can be admitted."""
        insort(self.admissible, request, key=queue_key)

    def add_compiling(self, request: Request, constraint: Constraint) -> None:
        """Add a request whose grammar is being compiled."""
        self._compiling[constraint] = request
        constraint.compilation.add_done_callback(lambda _: self._compiled.put(constraint))

    def remove(self, request: Request) -> None:
        """Remove a request, and end its wait for a grammar."""
        if (constraint := request.constraint) is not None and constraint in self._compiling:
            self._stop_compiling(constraint)
            return
        index = bisect_left(self.admissible, queue_key(request), key=queue_key)
        assert self.admissible[index] is request
        del self.admissible[index]

    def end_compiling(self, timeout_s: float) -> Iterator[Request]:
        """Make requests admissible whose compilation has ended, and yield those whose grammars are invalid.

        Wait up to `timeout_s` for the first one.
        """
        with suppress(Empty):
            while timeout_s or not self._compiled.empty():
                constraint = self._compiled.get(timeout=timeout_s)
                timeout_s = 0.0
                if constraint in self._compiling:  # the request may have been aborted meanwhile
                    request = self._stop_compiling(constraint)
                    self.add(request)  # an invalid one too, until the caller ends it
                    constraint.begin()
                    if constraint.error:
                        yield request

    def _stop_compiling(self, constraint: Constraint) -> Request:
        constraint.stop_waiting()
        return self._compiling.pop(constraint)
