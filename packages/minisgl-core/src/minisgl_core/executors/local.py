"""Ranks as processes of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minisgl_core.contracts.executor import Executor, RankPlacement


class LocalExecutor(Executor):
    """One process per rank on this host; local ranks are the global ones."""

    def place(self, size: int, directory: str) -> Sequence[RankPlacement]:
        """Unix sockets and a file of the launch's directory."""
        meeting = f"file://{directory}/rendezvous"
        return [RankPlacement(rank, size, rank, f"ipc://{directory}/rank-{rank}", meeting) for rank in range(size)]

    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        """Run the rank in the child itself."""
        self.start_process(name, target, *args)
