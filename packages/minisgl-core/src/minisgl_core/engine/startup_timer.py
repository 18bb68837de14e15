"""Timer of the phases of an engine's start."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


class StartupTimer:
    """Timer of named phases.

    Attributes:
        seconds: duration of each phase so far, by name, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, what: str) -> None:
        """End a phase, which began with the last call; `what` names it, such as ``loaded the weights``."""
        now = time.perf_counter()
        self.seconds[what], self._last = now - self._last, now
        logger.info("%s in %.1f s", what, self.seconds[what])
