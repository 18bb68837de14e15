"""Tensor-parallel ranks as threads of one process, for tests of sharded layers."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from minisgl_core.contracts.communicator import AddNorm, Communicator, SingleRank

Result = TypeVar("Result")

_TIMEOUT_S = 60.0


class _Exchange:
    """Shared state in which ranks exchange values.

    Attributes:
        running: semaphore that a rank holds unless it waits for others. It limits how many ranks run at a time.
        barrier: barrier of the ranks, which an error of a rank breaks.
        messages: tensors that were sent and not received yet, by sender and receiver.
    """

    def __init__(self, size: int, max_running: int) -> None:
        self.running = threading.Semaphore(max_running)
        self._values: list[Any] = [None] * size
        self.messages: defaultdict[tuple[int, int], SimpleQueue[torch.Tensor]] = defaultdict(SimpleQueue)
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)

    def combine(self, rank: int, value: Any, function: Callable[[list[Any]], Result]) -> Result:
        """Return ``function(values)`` of all ranks' values in rank order."""
        self._values[rank] = value
        with self.waiting():
            self.barrier.wait()
        result = function(self._values)
        with self.waiting():
            self.barrier.wait()  # no rank may change its value before all have read it
        return result

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let another rank run while this one waits for others."""
        self.running.release()
        try:
            yield
        finally:
            self.running.acquire()


class ThreadCommunicator(Communicator):
    """Communicator between threads. It sums in rank order, so that all ranks have bitwise equal results.

    If the rows divide evenly by the ranks, `all_reduce_add_norm` returns NaN in the residual's rows of the other ranks, whose
    values the contract leaves open.
    """

    def __init__(self, rank: int, size: int, exchange: _Exchange) -> None:
        self.rank, self.size, self._exchange = rank, size, exchange

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce in place, as the contract allows."""
        return x.copy_(self._exchange.combine(self.rank, x, lambda parts: sum(parts, torch.zeros_like(x))))

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise this rank's rows, and gather those of the others."""
        if len(x) % self.size:
            return super().all_reduce_add_norm(x, residual, weight, eps, add_norm)
        rows = slice(self.rank * len(x) // self.size, (self.rank + 1) * len(x) // self.size)
        norm, added = add_norm(self.all_reduce(x)[rows], residual[rows], weight, eps)
        new_residual = torch.full_like(residual, torch.nan)
        new_residual[rows] = added
        return self.all_gather(norm, 0), new_residual

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._exchange.combine(self.rank, x, lambda parts: torch.cat(parts, dim))

    def send(self, x: torch.Tensor, dst: int) -> None:
        self._exchange.messages[self.rank, dst].put(x.clone())

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        with self._exchange.waiting():
            received = self._exchange.messages[src, self.rank].get(timeout=_TIMEOUT_S)
        return x.copy_(received)

    def broadcast_object(self, value: object) -> object:
        return self._exchange.combine(self.rank, value, lambda values: values[0])


def run_ranks(size: int, function: Callable[[Communicator], Result], *, one_at_a_time: bool = False) -> list[Result]:
    """Call `function` once per rank and return the results in rank order. The first error is raised.

    Ranks run concurrently, or in turns between collectives for code that is not thread-safe, such as Triton's interpreter.
    """
    if size == 1:
        return [function(SingleRank())]
    exchange = _Exchange(size, max_running=1 if one_at_a_time else size)

    def run(rank: int) -> Result:
        try:
            with exchange.running:
                return function(ThreadCommunicator(rank, size, exchange))
        except BaseException:
            exchange.barrier.abort()  # wakes ranks that wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
