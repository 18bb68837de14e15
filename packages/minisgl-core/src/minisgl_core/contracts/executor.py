"""Contract of executors, which start the ranks of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Ranks and addresses of one rank's process. Plain data, which is passed to the process.

    Attributes:
        rank: global rank, in ``[0, size)``; rank 0 schedules.
        size: number of ranks of the engine.
        local_rank: rank on its host, which selects the device.
        address: ZeroMQ address where the rank receives the plans of rank 0; rank 0 receives the results of a pipeline there.
        init_method: torch.distributed URL, the same for all ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    init_method: str = ""


class StartProcess(Protocol):
    """Function that starts a named child process and watches it; see `minisgl_core.runtime.supervisor.Supervisor`."""

    def __call__(self, name: str, target: Callable[..., None] | str, *args: Any) -> None:
        """Run ``target(*args, report)`` in the child, which calls `report` with a `Ready` once it has started."""


class Executor(ABC):
    """Starter of an engine's ranks, which assigns their placements.

    Each rank has a child of this process, made by `start_process`, which the launch watches. If a child ends, the engine ends
    with its error. At the end of the launch the children are asked to end. `local` runs the rank in the child. If an executor
    runs the rank elsewhere, the child waits for the rank, passes its report on, and ends with it.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, size: int) -> list[str]:
        """Return the reasons why this executor cannot run `size` ranks here, one sentence each; empty if it can."""
        return []

    def __init__(self, start_process: StartProcess) -> None:
        """`start_process` starts children of this process."""
        self.start_process = start_process

    @abstractmethod
    def place(self, size: int, directory: str) -> Sequence[RankPlacement]:
        """Return the placement of each rank, in rank order. Rank 0 runs on this host.

        Args:
            size: number of ranks.
            directory: private directory of the launch on this host, for Unix sockets and files.
        """

    @abstractmethod
    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        """Run ``target(*args, report)`` at a placement, and return without waiting for it.

        Args:
            name: name of the process, for people.
            placement: one of the results of `place`; `args` contain it.
            target: a function, or ``module:function``.
            args: plain data that can be pickled.
        """
