"""Measure the time of a router's decision and of the replicas' events, without processes.

    python scripts/bench_router.py --replicas 64 --prefixes 1000000 --tokens 2048

Prompts begin with one of 1,000 shared prefixes and end with 4 blocks of their own. Each measured prompt is routed twice,
first with new blocks at its end. Prompts and events are made outside the measured times.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from minisgl_core.contracts.router import BlockKeys, RoutedPrompt, Router, RouterSpec
from minisgl_core.plugins.registry import Registry

BLOCK_SIZE = 16
NUM_SHARED = 1000
NUM_OWN_BLOCKS = 4


@dataclass(slots=True)
class Replica:
    """Load of a replica."""

    replica: int
    num_requests: int
    num_prompt_tokens: int


def fill(router: Router, shared: list[BlockKeys], num_prefixes: int, num_replicas: int) -> list[float]:
    """Report prompts to a router as cached; return the seconds per event of each message."""
    rng, times = np.random.default_rng(1), []
    for step in range(num_prefixes // 250):  # a message has the blocks of 250 prompts
        keys = np.concatenate((shared[step % NUM_SHARED], rng.integers(1, 1 << 63, 250 * NUM_OWN_BLOCKS, np.uint64)))
        start = time.perf_counter()
        router.inserted(step % num_replicas, keys)
        times.append((time.perf_counter() - start) / len(keys))
    return times


def measure(name: str, num_replicas: int, num_prefixes: int, num_tokens: int) -> None:
    """Print the times of one router."""
    rng = np.random.default_rng(0)
    starts = [rng.integers(0, 50_000, num_tokens, np.int32) for _ in range(NUM_SHARED)]
    prefixes = [RoutedPrompt(start, BLOCK_SIZE).block_keys()[:-NUM_OWN_BLOCKS] for start in starts]
    num_blocks = num_prefixes * NUM_OWN_BLOCKS + sum(map(len, prefixes))
    router: Router = Registry.from_environment().load("router", name)(RouterSpec(num_replicas, num_blocks))
    event_s = fill(router, prefixes, num_prefixes, num_replicas) if router.uses_events else [0.0]
    replicas = [Replica(number, number % 7, 1000) for number in range(num_replicas)]
    times = []
    for step in range(4000):
        tokens = starts[step // 4 % NUM_SHARED].copy()
        tokens[-NUM_OWN_BLOCKS * BLOCK_SIZE :] += np.int32(step // 2)
        prompt = RoutedPrompt(tokens, BLOCK_SIZE)
        start = time.perf_counter()
        router.route(prompt, replicas)
        times.append(time.perf_counter() - start)
    p50, p90, p99 = np.percentile(times, [50, 90, 99]) * 1e6
    events = f"; {np.median(event_s) * 1e6:.2f} us per inserted block" if router.uses_events else ""
    size = f"; {router.stats()['table_bytes'] / 2**20:.0f} MiB" if "table_bytes" in router.stats() else ""
    print(f"{name:<13} decision: median {p50:.0f} us, p90 {p90:.0f} us, p99 {p99:.0f} us{events}{size}")


def main() -> None:
    """Measure all routers that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", action="append", help="default: the three that are shipped")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--prefixes", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    for name in options.router or ["round-robin", "least-loaded", "prefix"]:
        measure(name, options.replicas, options.prefixes, options.tokens)


if __name__ == "__main__":
    main()
