"""When requests arrive: seconds since the start of a run, one after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np


def arrivals(rate_per_s: float, burstiness: float, seed: int) -> Iterator[float]:
    """Arrival times without end.

    The gaps are of a gamma distribution with mean ``1 / rate_per_s``, as in vLLM's benchmark.

    Args:
        rate_per_s: arrivals a second on average; infinite for all at once.
        burstiness: shape of the gamma distribution: 1 makes a Poisson process, less comes in bursts, more is steadier, and
            infinity is a fixed rate.
        seed: equal seeds give equal times.
    """
    if math.isinf(rate_per_s):
        return itertools.repeat(0.0)
    if math.isinf(burstiness):
        return (place / rate_per_s for place in itertools.count())
    return itertools.accumulate(_gaps(rate_per_s, burstiness, seed), initial=0.0)


def _gaps(rate_per_s: float, burstiness: float, seed: int) -> Iterator[float]:
    random = np.random.default_rng(seed)
    while True:
        yield random.gamma(burstiness, 1 / (rate_per_s * burstiness))
