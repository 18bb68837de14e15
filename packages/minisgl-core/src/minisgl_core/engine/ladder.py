"""Steps of several sizes, recorded as device graphs that share memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import track

from minisgl_core.errors import MinisglError


class RecordedStep(Protocol):
    """A step of one size."""

    @property
    def graphs(self) -> Sequence[Any]:
        """Its graphs, in the order of their replay; see `Platform.capture_pieces`."""


Recorded = TypeVar("Recorded", bound=RecordedStep)


def record_ladder(
    sizes: Sequence[int], record: Callable[[int, Any], Recorded], *, what: str, remedy: str, progress: bool
) -> dict[int, Recorded]:
    """Record each size, largest first, so that the smaller ones fit in its memory.

    Args:
        sizes: of steps.
        record: is given a size and the memory to share, None for the first.
        what: for the bar that is drawn on stderr, with `progress`, where that is a terminal.
        remedy: for whoever meets an error here.
        progress: whether to draw it.

    Raises:
        MinisglError: one cannot be recorded.
    """
    recorded: dict[int, Recorded] = {}
    pool: Any = None
    console = Console(stderr=True)
    disable = not (progress and console.is_terminal)
    largest_first = sorted(sizes, reverse=True)
    try:
        for size in track(largest_first, f"Recording {what}", console=console, disable=disable, transient=True):
            recorded[size] = record(size, pool)
            pool = pool or recorded[size].graphs[0].pool()
    except BaseException as error:
        free(recorded)
        if isinstance(error, Exception):
            why = " ".join(str(error).split())
            raise MinisglError(f"{what} cannot be recorded: {type(error).__name__}: {why} ({remedy})") from error
        raise
    return recorded


def free(recorded: Mapping[int, RecordedStep]) -> None:
    """Free the graphs, whoever still refers to them: a communicator whose collectives they hold can be left only then."""
    for step in recorded.values():
        for graph in step.graphs:
            graph.reset()
