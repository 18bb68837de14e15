"""Conformance kit of executors."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from minisgl_core.contracts.executor import Executor, ExecutorSpec, RankPlacement
from minisgl_core.errors import WorkerDiedError
from minisgl_core.protocol.messages import Ready, Stop
from minisgl_core.runtime.ipc import Receiver, Sender
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_core.testing.reasons import skip_if_unsupported


class ExecutorTests:
    """Tests of an executor. Subclass this and set `provider`. The ranks use no device.

    Attributes:
        limit_s: longest wait for the ranks.
    """

    provider: ClassVar[type[Executor]]
    spec: ClassVar[ExecutorSpec] = ExecutorSpec(tp=2)
    limit_s: ClassVar[float] = 120.0

    @contextmanager
    def placed(self, supervisor: Supervisor) -> Iterator[tuple[Executor, list[RankPlacement], str]]:
        """Return an executor, its placements and their directory. Skip the test if the executor is not supported here."""
        skip_if_unsupported(self.provider, self.spec)
        executor = self.provider(supervisor.start, self.spec)
        with tempfile.TemporaryDirectory() as directory:
            try:
                yield executor, list(executor.place(directory)), directory
            finally:
                supervisor.terminate()
                executor.close()

    def test_placements_are_consistent(self) -> None:
        """Placements are in rank order, with one `init_method`, distinct addresses, and local ranks that count from 0."""
        size = self.spec.size
        with self.placed(Supervisor()) as (_, placements, _):
            assert [each.rank for each in placements] == list(range(size))
            assert {each.size for each in placements} == {size}
            assert len({each.init_method for each in placements}) == 1
            assert all("://" in each.init_method and "://" in each.address for each in placements)
            assert len({each.address for each in placements}) == size, "two ranks have the same address"
            nodes = {each.nodes for each in placements}
            assert len(nodes) == 1, "the ranks have different lists of nodes"
            of_rank = nodes.pop() or ("this host",) * size
            assert len(of_rank) == size, "nodes must have one entry per rank"
            for node in set(of_rank):
                local = [each.local_rank for each in placements if of_rank[each.rank] == node]
                assert local == list(range(len(local))), f"the local ranks of {node} do not count from 0"

    def test_ranks_start_and_communicate(self) -> None:
        """Each rank joins the rendezvous of its placement, reports `Ready`, receives at its address, and ends at the shutdown."""
        supervisor = Supervisor()
        with self.placed(supervisor) as (executor, placements, directory):
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
            ranks = [psutil.Process(int(each.read_text())) for each in done]
        assert not psutil.wait_procs(ranks, self.limit_s)[1], "a rank still runs after the shutdown"

    @pytest.mark.parametrize("rank", [0, -1])
    def test_a_rank_that_exits_is_an_error(self, rank: int) -> None:
        """The supervisor raises an error that names the exited rank."""
        supervisor = Supervisor()
        with self.placed(supervisor) as (executor, placements, _):
            executor.start("exiting rank", placements[rank], die, placements[rank])
            with pytest.raises(WorkerDiedError, match="exiting rank"):
                supervisor.wait(timeout_s=self.limit_s)


def meet(placement: RankPlacement, directory: str, report: Callable[[Ready], None]) -> None:
    """Run a rank: join the rendezvous, report, and create a file when the first message arrives."""
    from torch.distributed.rendezvous import rendezvous

    with Receiver[Stop](placement.address, Stop) as receiver:
        store, _, _ = next(rendezvous(placement.init_method, placement.rank, placement.size))
        store.set(str(placement.rank), "here")
        store.wait([str(rank) for rank in range(placement.size)])
        report(Ready(process=f"rank {placement.rank} of {placement.size}, local {placement.local_rank}"))
        if receiver.receive() is not None:
            # Renamed when it is complete, so that nobody reads an empty file.
            Path(directory, f"new {placement.rank}").write_text(str(os.getpid()))
            Path(directory, f"new {placement.rank}").rename(Path(directory, f"done {placement.rank}"))
        receiver.receive()  # keep running, because the supervisor reports an exited rank as an error


def die(placement: RankPlacement, report: Callable[[Ready], None]) -> None:
    """Run a rank that exits at once."""
    os._exit(3)
