"""Timer of the phases of a process's start."""

import logging
import os
import time
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)


class StartupTimer:
    """Timer of named phases.

    Attributes:
        seconds: duration of each phase so far, by name, in order.
    """

    def __init__(self, elapsed_s: float = 0.0) -> None:
        """Start the first phase, `elapsed_s` ago."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter() - elapsed_s

    def done(self, what: str) -> None:
        """End a phase, which began with the last call; `what` names it, such as ``loaded the weights``."""
        now = time.perf_counter()
        self.seconds[what], self._last = now - self._last, now
        logger.info("%s in %.1f s", what, self.seconds[what])


def process_age_s() -> float:
    """Return the seconds since this process was started. On Linux, psutil's time may be off by a second or more."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return time.time() - psutil.Process().create_time()
    # Field 22 of the file is the start time in clock ticks after boot. The second one, in parentheses, may contain spaces.
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
