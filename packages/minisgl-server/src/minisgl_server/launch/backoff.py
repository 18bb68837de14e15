"""Delay before a process is restarted."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DELAY_S = 60.0
SERVED_S = 60.0
"""Time that a process must have served for its earlier failures to be forgotten."""


@dataclass(slots=True)
class Backoff:
    """Exponential backoff: no delay after the first failure, then 1, 2, 4, ... seconds, and at most `MAX_DELAY_S`.

    Attributes:
        num_failures: failures without `SERVED_S` of service in between.
    """

    num_failures: int = 0

    def delay_s(self, served_s: float) -> float:
        """Return the delay before the restart of a process that has failed, and had served for `served_s`."""
        self.num_failures = 1 if served_s >= SERVED_S else self.num_failures + 1
        return 0.0 if self.num_failures == 1 else min(2.0 ** min(self.num_failures - 2, 10), MAX_DELAY_S)
