"""Cache hit rate of four replicas on two hosts, compared with one replica that has all their pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_folder
from ray_node import RayNode
from serve_launch import Launch, engines

pytest.importorskip("ray", reason="ray is not installed")

LOAD = (
    "--num-turns 5 --turn-delay 1 --num-requests 400 --max-concurrency 40 --shared-prefix-tokens 512 --num-prefixes 16"
    " --input-len 64 --output-len 24 --vocab-size 60 --seed 1 --num-warmups 0"
)
NUM_TOKENS = 16 * 512 + 80 * 5 * (64 + 24)
NUM_PAGES = NUM_TOKENS // 16 * 3 // 2
"""Number of pages, of which the load needs two thirds."""


def hit_rate(nodes: list[RayNode], results: Path, router: str, num_replicas: int) -> float:
    """Return the fraction of prompt tokens that the replicas found in their caches."""
    flags = ["--model", tiny_folder.llama(), "--page-size", "16", "--num-pages", f"{NUM_PAGES // num_replicas}"]
    launch = Launch(nodes[0], *flags, "--router", router, "--replicas", f"{num_replicas}")
    try:
        url = launch.wait_started().url
        if num_replicas > 1:  # one replica runs without Serve, as a child of the launch
            assert all(engines(node) for node in nodes), "Serve spreads the replicas over the hosts"
        bench = [sys.executable, "-c", "from minisgl_core.cli.main import main; main()", "bench", "serve"]
        subprocess.run([*bench, *LOAD.split(), "--url", url, "--json", results], check=True)
    finally:
        launch.close()
    [run] = json.loads(results.read_text())["runs"]
    assert run["num_completed"] == 400
    return float(run["hit_rate"])


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_prefix_router_nears_the_hit_rate_of_one_cache(nodes: list[RayNode], tmp_path: Path) -> None:
    one, prefix, round_robin = (
        hit_rate(nodes, tmp_path / "results.json", router, num_replicas)
        for router, num_replicas in (("prefix", 1), ("prefix", 4), ("round-robin", 4))
    )
    print(f"\nhit rate: prefix {prefix:.1%}, round-robin {round_robin:.1%}, one replica {one:.1%}")
    assert prefix >= 0.9 * one > round_robin
