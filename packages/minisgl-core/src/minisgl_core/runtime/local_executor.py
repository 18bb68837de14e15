"""Executor ``local``: ranks are processes on this host."""

from collections.abc import Callable, Sequence
from typing import Any

from minisgl_core.contracts.executor import Executor, ExecutorSpec, RankPlacement


class LocalExecutor(Executor):
    """One process per rank on this host; local ranks equal global ranks."""

    @classmethod
    def unsupported(cls, spec: ExecutorSpec) -> list[str]:
        """Refuse any placement but ``pack``, which needs only one host."""
        remedy = "use --executor ray for several hosts"
        return [] if spec.placement == "pack" else [f"it cannot {spec.placement} ranks, as it has one host; {remedy}"]

    def place(self, directory: str) -> Sequence[RankPlacement]:
        """Return placements with Unix sockets and a rendezvous file in `directory`."""
        size, rendezvous = self.spec.size, f"file://{directory}/rendezvous"
        return [RankPlacement(rank, size, rank, f"ipc://{directory}/rank-{rank}", rendezvous) for rank in range(size)]

    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        self.start_process(name, target, *args)
