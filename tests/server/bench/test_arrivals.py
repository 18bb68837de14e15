"""Arrival times follow their distributions; no clock is involved."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from minisgl_server.bench.serve.conversations import arrivals


def gaps(rate: float, burstiness: float, seed: int, count: int = 20_000) -> np.ndarray:
    times = list(itertools.islice(arrivals(rate, burstiness, seed), count + 1))
    assert times[0] == 0
    return np.diff(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_gaps_are_gamma(rate: float, burstiness: float) -> None:
    found = gaps(rate, burstiness, seed=3)
    assert (found >= 0).all()
    deviation = 1 / (rate * math.sqrt(burstiness))
    assert found.mean() == pytest.approx(1 / rate, abs=4 * deviation / math.sqrt(len(found)))
    assert found.std() == pytest.approx(deviation, rel=0.08)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03, "gaps do not depend on each other"


def test_a_poisson_process_has_exponential_gaps() -> None:
    """The Kolmogorov-Smirnov distance is below its 0.1% quantile, and the variance of counts equals their mean."""
    found = np.sort(gaps(5.0, 1.0, seed=11))
    expected = 1 - np.exp(-5.0 * found)
    places = np.arange(len(found) + 1) / len(found)
    assert max((expected - places[:-1]).max(), (places[1:] - expected).max()) < 1.95 / math.sqrt(len(found))
    times = np.cumsum(gaps(5.0, 1.0, seed=12))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)


def test_fixed_rate_and_all_at_once() -> None:
    assert gaps(8.0, math.inf, seed=0, count=50) == pytest.approx(np.full(50, 0.125))
    assert not gaps(math.inf, 1.0, seed=0, count=50).any()


def test_seeds() -> None:
    assert (gaps(1.0, 1.0, 5, 9) == gaps(1.0, 1.0, 5, 9)).all()
    assert (gaps(1.0, 1.0, 5, 9) != gaps(1.0, 1.0, 6, 9)).any()
