"""Ranks that run one after the other in one thread, so that what they exchange can be tested without processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from minisgl_core.contracts.communicator import Communicator

Result = TypeVar("Result")


class _Waits(Exception):
    """A rank has come to a collective that others have not joined yet."""


class _InTurn(Communicator):
    """Knows what the collectives up to some point have given; the one after it ends the rank's turn."""

    def __init__(self, rank: int, size: int, known: list[torch.Tensor]) -> None:
        self.rank, self.size = rank, size
        self._known, self._num_done = known, 0
        self.given: tuple[str, torch.Tensor] | None = None

    def _collective(self, what: str, x: torch.Tensor) -> torch.Tensor:
        if self._num_done == len(self._known):
            self.given = what, x.clone()
            raise _Waits
        self._num_done += 1
        return self._known[self._num_done - 1].clone()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._collective("sum", x)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._collective(f"gather {dim}", x)

    def broadcast_object(self, value: object) -> object:
        raise NotImplementedError


def run_in_turn(size: int, run: Callable[[Communicator], Result]) -> list[Result]:
    """What `run` returns for each rank. It is called again for every collective, so it may change nothing outside.

    Raises:
        AssertionError: the ranks do not call the same collectives with the same shapes.
    """
    known: list[torch.Tensor] = []
    while True:
        groups = [_InTurn(rank, size, known) for rank in range(size)]
        results: list[Any] = []
        for group in groups:
            with suppress(_Waits):
                results.append(run(group))
        if len(results) == size:
            return results
        given = [group.given for group in groups if group.given is not None]
        assert len(given) == size, "some ranks wait for others, which are done"
        kinds = {(what, x.shape, x.dtype) for what, x in given}
        assert len(kinds) == 1, f"the ranks meet in different collectives: {kinds}"
        [(what, _, _)], parts = kinds, [x for _, x in given]
        known.append(sum(parts[1:], parts[0]) if what == "sum" else torch.cat(parts, int(what.split()[1])))
