"""CUDA graphs of several capture sizes, which share one memory pool."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from minisgl_core.errors import MinisglError
from minisgl_core.utils.exceptions import one_line_with_type
from minisgl_core.utils.progress import progress_bar


class CapturedSizes(ABC):
    """Graphs of several capture sizes. A step runs in the smallest size that fits.

    A subclass captures a size as an object with ``graphs`` in replay order; see `Platform.capture_piecewise`.

    Attributes:
        name, remedy: name of the graphs, and remedy in error messages.
    """

    name: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.array(sorted(sizes))
        self._captured: dict[int, Any] = {}

    @abstractmethod
    def _capture(self, size: int, pool: Any) -> Any:
        """Capture the graphs of one size in a memory pool; None for a new one."""

    def _capture_sizes(self, sizes: Sequence[int], progress: bool) -> None:
        """Capture sizes, the largest first, so that smaller ones reuse its memory pool.

        Raises:
            MinisglError: a size cannot be captured. None of these sizes is captured then.
        """
        captured: dict[int, Any] = {}
        pool = next((each.graphs[0].pool() for each in self._captured.values()), None)
        try:
            with progress_bar(progress) as bar:
                for size in bar.track(sorted(sizes, reverse=True), description=f"Capturing {self.name}"):
                    captured[size] = self._capture(size, pool)
                    pool = pool or captured[size].graphs[0].pool()
        except BaseException as error:
            _free(captured)
            if isinstance(error, Exception):
                why = one_line_with_type(error)
                raise MinisglError(f"{self.name} cannot be captured: {why} ({self.remedy})") from error
            raise
        self._captured |= captured

    def _size_of(self, count: int) -> int:
        """Return the smallest capture size of at least `count`."""
        return int(self._sizes[np.searchsorted(self._sizes, count)])

    def close(self) -> None:
        """Free all graphs."""
        _free(self._captured)
        self._captured.clear()


def _free(captured: dict[int, Any]) -> None:
    """Free the graphs even if references exist. A rank can leave a communicator only when no graph has its collectives."""
    for step in captured.values():
        for graph in step.graphs:
            graph.reset()
