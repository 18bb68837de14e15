"""Conformance kit of executors."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from minisgl_core.contracts.executor import Executor, RankPlacement
from minisgl_core.errors import WorkerDiedError
from minisgl_core.protocol.messages import Ready, Stop
from minisgl_core.runtime.ipc import Receiver, Sender
from minisgl_core.runtime.supervisor import Supervisor


class ExecutorTests:
    """Tests of an executor. Subclass this and set `provider`. The ranks use no device.

    Attributes:
        provider: the class.
        size: number of ranks.
        limit_s: longest wait for the ranks.
    """

    provider: ClassVar[type[Executor]]
    size: ClassVar[int] = 2
    limit_s: ClassVar[float] = 120.0

    def placements(self, supervisor: Supervisor, directory: str) -> tuple[Executor, list[RankPlacement]]:
        """Return an executor and its placements. Skip the test if it is not supported here."""
        reasons = self.provider.unsupported(self.size)
        assert isinstance(reasons, list), f"{reasons!r} is not a list"
        if reasons:
            pytest.skip("; ".join(reasons))
        executor = self.provider(supervisor.start)
        return executor, list(executor.place(self.size, directory))

    def test_placements_are_consistent(self) -> None:
        """Placements are in rank order, with one `init_method`, distinct addresses, and local ranks that count from 0."""
        with tempfile.TemporaryDirectory() as directory:
            _, placements = self.placements(Supervisor(), directory)
        assert [each.rank for each in placements] == list(range(self.size))
        assert {each.size for each in placements} == {self.size}
        assert len({each.init_method for each in placements}) == 1
        assert all("://" in each.init_method and "://" in each.address for each in placements)
        assert len({each.address for each in placements}) == self.size, "two ranks have the same address"
        local = [each.local_rank for each in placements]
        assert local[0] == 0, "rank 0 must have local rank 0"
        assert all(each == 0 or each - 1 in local for each in local), "the local ranks of a host do not count from 0"

    def test_ranks_start_and_communicate(self) -> None:
        """Each rank gets its placement, meets the others at `init_method`, reports `Ready`, and receives at its address."""
        with tempfile.TemporaryDirectory() as directory:
            supervisor = Supervisor()
            try:
                executor, placements = self.placements(supervisor, directory)
                names = [f"rank {each.rank}" for each in placements]
                for name, placement in zip(names, placements, strict=True):
                    executor.start(name, placement, meet, placement, directory)
                assert supervisor.wait_ready(*names, timeout_s=self.limit_s), "a rank did not report that it is ready"
                assert [supervisor.ready[name].process for name in names] == [
                    f"rank {each.rank} of {each.size}, local {each.local_rank}" for each in placements
                ]
                for placement in placements:
                    with Sender(placement.address) as sender:
                        sender.send(Stop())
                done = [Path(directory, f"done {each.rank}") for each in placements]
                deadline = time.monotonic() + self.limit_s
                while not all(each.exists() for each in done) and time.monotonic() < deadline:
                    supervisor.wait(timeout_s=0.1)
                assert all(each.exists() for each in done), "a rank received no message at its address"
            finally:
                supervisor.terminate()

    def test_a_rank_that_exits_is_an_error(self) -> None:
        """The supervisor raises an error that names the exited rank."""
        with tempfile.TemporaryDirectory() as directory:
            supervisor = Supervisor()
            try:
                executor, placements = self.placements(supervisor, directory)
                executor.start("exiting rank", placements[0], die, placements[0])
                with pytest.raises(WorkerDiedError, match="exiting rank"):
                    supervisor.wait(timeout_s=self.limit_s)
            finally:
                supervisor.terminate()


def meet(placement: RankPlacement, directory: str, report: Callable[[Ready], None]) -> None:
    """Run a rank: meet the others, report, and create a file when the first message arrives."""
    from torch.distributed.rendezvous import rendezvous

    with Receiver[Stop](placement.address, Stop) as receiver:
        store, _, _ = next(rendezvous(placement.init_method, placement.rank, placement.size))
        store.set(str(placement.rank), "here")
        store.wait([str(rank) for rank in range(placement.size)])
        report(Ready(process=f"rank {placement.rank} of {placement.size}, local {placement.local_rank}"))
        if receiver.receive() is not None:
            Path(directory, f"done {placement.rank}").touch()
        receiver.receive()  # keep running, because the supervisor reports an exited rank as an error


def die(placement: RankPlacement, report: Callable[[Ready], None]) -> None:
    """Run a rank that exits at once."""
    assert placement.rank == 0
    assert torch.distributed.is_available()
    os._exit(3)
