"""Arrival times of requests, in seconds since the start of a run."""

import itertools
import math
from collections.abc import Iterator

import numpy as np


def arrivals(rate_per_s: float, burstiness: float, seed: int) -> Iterator[float]:
    """Return an endless iterator of arrival times.

    Inter-arrival times have a gamma distribution with mean ``1 / rate_per_s``, as in vLLM's benchmark.

    Args:
        rate_per_s: mean arrivals per second; infinite for all at once.
        burstiness: shape of the gamma distribution: 1 is a Poisson process, smaller values are burstier, larger ones are more
            regular, and infinity is a fixed rate.
        seed: seed of the random times.
    """
    if math.isinf(rate_per_s):
        return itertools.repeat(0.0)
    if math.isinf(burstiness):
        return (number / rate_per_s for number in itertools.count())
    random, scale = np.random.default_rng(seed), 1 / (rate_per_s * burstiness)
    return itertools.accumulate(iter(lambda: random.gamma(burstiness, scale), None), initial=0.0)
