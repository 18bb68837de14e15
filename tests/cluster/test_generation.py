"""Ranks on the nodes of a Ray cluster: the kit, and the tokens of one rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_folder
from ray_node import RayNode

from minisgl_backends.executor.ray_executor import RayExecutor
from minisgl_core.contracts.executor import ExecutorSpec
from minisgl_core.testing.executor_kit import ExecutorTests

pytest.importorskip("ray", reason="ray is not installed")


class TestKit(ExecutorTests):
    provider = RayExecutor
    spec = ExecutorSpec(tp=2)

    @pytest.fixture(autouse=True)
    def _cluster(self, node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", node.head)


def generate(model: str, *options: dict[str, Any], prefix: tuple[str, ...] = (), **environ: str) -> list[Any]:
    """Run `generate.py`, and return the lines that it prints."""
    command = [*prefix, sys.executable, Path(__file__).with_name("generate.py"), model, *map(json.dumps, options)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.nightly
@pytest.mark.parametrize("model", [tiny_folder.llama, tiny_folder.qwen3_moe])
def test_ranks_on_one_host_generate_what_one_does(model: Callable[[], str], node: RayNode) -> None:
    options = [{}, {"executor": "ray", "tp": 2, "pp": 2}]
    alone, ranks = generate(model(), *options, RAY_ADDRESS=node.head)
    assert ranks == [*alone, f"ranks 0-3 on {node.address}"]


@pytest.mark.nightly
def test_without_an_address_a_cluster_starts_and_ends_with_it() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short, for the paths of Ray's sockets
        environ = {"RAY_ADDRESS": "", "RAY_TMPDIR": folder}
        alone, ranks = generate(tiny_folder.llama(), {}, {"executor": "ray", "pp": 2}, **environ)
        assert ranks[0] == alone[0]
        left = [each for each in psutil.process_iter(["cmdline"]) if folder in " ".join(each.info["cmdline"] or ())]
        assert not psutil.wait_procs(left, 30)[1]


@pytest.mark.parametrize("model", [tiny_folder.llama, pytest.param(tiny_folder.qwen3_moe, marks=pytest.mark.nightly)])
def test_ranks_on_two_hosts_generate_what_one_does(model: Callable[[], str], two_nodes: list[RayNode]) -> None:
    first, second = two_nodes
    options: list[dict[str, Any]] = [
        {},
        {"tp": 2, "placement": "strict-spread"},
        {"pp": 2, "placement": "strict-spread"},
        {"tp": 2, "pp": 2},
    ]
    for each in options[1:]:
        each["executor"] = "ray"
    alone, *ranks = generate(model(), *options, prefix=first.prefix, RAY_ADDRESS=first.head)
    one_each = f"rank 0 on {first.address}, rank 1 on {second.address}"
    stages = f"ranks 0-1 on {first.address}, ranks 2-3 on {second.address}"
    assert ranks == [[*alone, one_each], [*alone, one_each], [*alone, stages]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, "needs bundles of 4 CPU, the first on this node.*--placement spread lets a stage span nodes"),
        ({"pp": 3, "placement": "strict-spread"}, "needs bundles of 1 CPU; 1 CPU; 1 CPU, the first on this node"),
    ],
)
def test_too_few_or_small_nodes_are_an_error(options: dict[str, Any], message: str, two_nodes: list[RayNode]) -> None:
    command = [*two_nodes[0].prefix, sys.executable, Path(__file__).with_name("generate.py"), tiny_folder.llama()]
    environ = {**os.environ, "RAY_ADDRESS": two_nodes[0].head}
    options = {"executor": "ray", **options}
    done = subprocess.run([*command, json.dumps(options)], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
