"""The extension point for executors: they start the ranks of an engine somewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Place of one rank of an engine, and the addresses at which it meets the others. Plain data, to hand to its process.

    Attributes:
        rank: global, in ``[0, size)``; rank 0 schedules.
        size: ranks of the engine.
        local_rank: number among the ranks of its own host; it picks the device.
        address: ZeroMQ address at which the rank receives the plans of rank 0.
        init_method: torch.distributed URL at which all ranks meet, the same for each.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    init_method: str = ""


class StartProcess(Protocol):
    """Starts a named child of this process, which is watched from then on; see `minisgl_core.process.Supervisor`."""

    def __call__(self, name: str, target: Callable[..., None] | str, *args: Any) -> None:
        """Run ``target(*args, report)`` in it; `report` is called with a `Ready` once it has started."""


class Executor(ABC):
    """Starts the ranks of an engine, and tells each its placement.

    Every rank has a child of this process, made by `start_process`, and the launch watches those children: where one ends, the
    engine ends with its error, and at the end of the launch they are asked to end. `local` runs a rank in its child. An executor
    that runs ranks elsewhere has the child wait for its rank there, pass on what it reports, and end with it.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, size: int) -> list[str]:
        """Say why this executor cannot run `size` ranks here, one sentence per reason; empty if it can."""
        return []

    def __init__(self, start_process: StartProcess) -> None:
        """Keep what starts children of this process."""
        self.start_process = start_process

    @abstractmethod
    def place(self, size: int, directory: str) -> Sequence[RankPlacement]:
        """Decide where each rank runs, in rank order. Rank 0 runs on this host.

        Args:
            size: number of ranks.
            directory: private to the launch, on this host, for Unix sockets and files.
        """

    @abstractmethod
    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        """Run ``target(*args, report)`` at a placement; returns without waiting for it.

        Args:
            name: of the process, for people.
            placement: one of those that `place` returned; it is among `args`.
            target: a function, or ``module:function``.
            args: plain data that pickle takes.
        """
