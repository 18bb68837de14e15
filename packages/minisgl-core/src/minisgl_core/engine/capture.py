"""Capture of CUDA graphs for several sizes that share one memory pool."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from minisgl_core.errors import MinisglError
from minisgl_core.utils.exceptions import one_line_with_type
from minisgl_core.utils.progress import progress_bar


class CapturedStep(Protocol):
    """Captured graphs of one size."""

    @property
    def graphs(self) -> Sequence[Any]:
        """Graphs in replay order; see `Platform.capture_piecewise`."""


Captured = TypeVar("Captured", bound=CapturedStep)


def capture_sizes(
    sizes: Sequence[int],
    capture: Callable[[int, Any], Captured],
    *,
    what: str,
    remedy: str,
    progress: bool,
    pool: Any = None,
) -> dict[int, Captured]:
    """Capture the graphs of all sizes, the largest first, so that smaller ones reuse its memory pool.

    Args:
        sizes: capture sizes.
        capture: captures one size, given the size and the memory pool to share.
        what: name of the graphs, for the progress bar and errors.
        remedy: remedy in error messages.
        progress: show a progress bar on stderr if that is a terminal.
        pool: memory pool of other graphs; None if there is none yet.

    Raises:
        MinisglError: a size cannot be captured.
    """
    captured: dict[int, Captured] = {}
    try:
        with progress_bar(progress) as bar:
            for size in bar.track(sorted(sizes, reverse=True), description=f"Capturing {what}"):
                captured[size] = capture(size, pool)
                pool = pool or captured[size].graphs[0].pool()
    except BaseException as error:
        free_graphs(captured)
        if isinstance(error, Exception):
            raise MinisglError(f"{what} cannot be captured: {one_line_with_type(error)} ({remedy})") from error
        raise
    return captured


def free_graphs(captured: Mapping[int, CapturedStep]) -> None:
    """Free the graphs even if references exist. A rank can leave a communicator only when no graph has its collectives."""
    for step in captured.values():
        for graph in step.graphs:
            graph.reset()
