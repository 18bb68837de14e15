"""Random numbers for sampling, each a pure function of the request's seed and the token's index.

So a request's random numbers depend neither on the other requests in the batch nor on preemptions.
"""

import numpy as np
import numpy.typing as npt


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return one number in [0, 1) per (seed, counter) pair, float32 [N]."""
    mixed = _splitmix64(seeds ^ _splitmix64(counters.astype(np.uint64)))
    # 24 bits: every value is exact in float32, and 1.0 is never reached.
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
