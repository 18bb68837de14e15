"""Contract of executors, which start the ranks of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Rank, device and addresses of one process of an engine, as plain data that is passed to the process.

    Attributes:
        rank: global rank, in ``[0, size)``; rank 0 schedules.
        size: number of ranks of the engine.
        local_rank: rank on its host, which selects the device.
        address: ZeroMQ address at which this rank receives the plans of rank 0. Rank 0 receives the results of the last
            pipeline stage at its own. A ``tcp://`` address contains a key; see `minisgl_core.runtime.curve.tcp_address`.
        init_method: torch.distributed URL, the same for all ranks.
        nodes: name of each rank's host, in rank order; empty if all ranks run on this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = field(default="", repr=False)
    init_method: str = ""
    nodes: tuple[str, ...] = ()

    def spans_hosts(self, group_size: int) -> bool:
        """Return True if ranks on several hosts form a group, where `group_size` consecutive ranks form each group."""
        groups = (self.nodes[first : first + group_size] for first in range(0, len(self.nodes), group_size))
        return any(len(set(group)) > 1 for group in groups)


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """Ranks that an executor starts.

    Attributes:
        tp: ranks of each pipeline stage.
        pp: pipeline stages.
        placement: value of ``--placement``.
        platform: value of ``--platform``, which may be ``auto``.
        replicas: number of engines of the server, each with ``tp * pp`` ranks.
        log_level: lowest level that the ranks log; None does not configure their logging.
        log_format: ``text`` or ``json``.
    """

    tp: int = 1
    pp: int = 1
    placement: str = "pack"
    platform: str = "auto"
    replicas: int = 1
    log_level: str | None = None
    log_format: str = "text"

    @property
    def size(self) -> int:
        """Number of ranks of an engine."""
        return self.tp * self.pp


class StartProcess(Protocol):
    """Function that starts a named child process and watches it; see `minisgl_core.runtime.supervisor.Supervisor`."""

    def __call__(self, name: str, target: Callable[..., None] | str, *args: Any) -> None:
        """Run ``target(*args, report)`` in the child.

        Once it has started, the child calls `report` with a `minisgl_core.protocol.messages.Ready`.
        """


class Executor(ABC):
    """Executor of an engine: it assigns a placement to each rank, and starts the ranks.

    For each rank, `start_process` starts a child process, which the launcher monitors. If a child exits, the engine stops and
    reports the child's error. At shutdown, the launcher asks the children to exit. The executor `local` runs the rank in the
    child. If an executor runs the rank elsewhere, the child waits for the rank, forwards its report, and exits with it.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, spec: ExecutorSpec) -> list[str]:
        """Return the reasons why this executor cannot start these ranks here, one sentence each; empty if it can."""
        return []

    def __init__(self, start_process: StartProcess, spec: ExecutorSpec) -> None:
        """Start nothing yet. `start_process` starts children of this process."""
        self.start_process, self.spec = start_process, spec

    @abstractmethod
    def place(self, directory: str) -> Sequence[RankPlacement]:
        """Return the placement of each rank of an engine, in rank order. Rank 0 runs on this host.

        Args:
            directory: private directory on this host, for Unix sockets and files.
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

    def close(self) -> None:
        """Stop the ranks that run elsewhere, and release the resources that `place` reserved. May be called twice.

        The launcher calls this last.
        """
