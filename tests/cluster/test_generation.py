"""Ranks on the nodes of a Ray cluster: the kit, the tokens of one rank, and peers without the key."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_folder
from launched import DEADLINE_S
from ray_node import RayNode

from minisgl_backends.executor.ray_executor import RayExecutor
from minisgl_core import LLM, SamplingParams
from minisgl_core.contracts.executor import ExecutorSpec
from minisgl_core.errors import MinisglError
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_core.testing.executor_kit import ExecutorTests

ray = pytest.importorskip("ray", reason="ray is not installed")

PROMPTS = [[5, 9, 3, 7, 11], list(range(3, 23)), [5, 9, 3, 7, 12], [44, 44, 44]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
ON_EACH: dict[str, Any] = {"placement": "strict-spread"}


def load(model: str, **options: Any) -> LLM:
    return LLM(model, dtype="float32", platform="cpu", ops="torch", num_pages=100, **options)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@lru_cache
def tokens_of_one_rank(model: str) -> list[list[int]]:
    with load(model) as llm:
        return tokens_of(llm)


@pytest.fixture(scope="module")
def connected(nodes: list[RayNode]) -> Iterator[list[RayNode]]:
    """Cluster to which this process is connected."""
    ray.init(nodes[0].head, logging_level="WARNING")
    yield nodes
    ray.shutdown()


@pytest.mark.usefixtures("connected")
class TestKit(ExecutorTests):
    provider = RayExecutor
    spec = ExecutorSpec(tp=2, placement="strict-spread")


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("model", "options", "places"),
    [
        (tiny_folder.llama, {"tp": 2, **ON_EACH}, "rank 0 on {}, rank 1 on {}"),
        (tiny_folder.qwen3_moe, {"pp": 2, **ON_EACH}, "rank 0 on {}, rank 1 on {}"),
        nightly(tiny_folder.llama, {"pp": 2, **ON_EACH}, "rank 0 on {}, rank 1 on {}"),
        nightly(tiny_folder.qwen3_moe, {"tp": 2, **ON_EACH}, "rank 0 on {}, rank 1 on {}"),
        nightly(tiny_folder.llama, {"tp": 2, "pp": 2}, "ranks 0-1 on {}, ranks 2-3 on {}"),
        nightly(tiny_folder.qwen3_moe, {"tp": 2, "pp": 2}, "ranks 0-1 on {}, ranks 2-3 on {}"),
    ],
)
def test_ranks_on_two_hosts_generate_the_tokens_of_one(
    model: Callable[[], str], options: dict[str, Any], places: str, connected: list[RayNode]
) -> None:
    with load(model(), executor="ray", **options) as llm:
        placement = [reason for name, _, reason in llm.info.choices if name == "placement"]
        assert placement == [places.format(*(node.address for node in connected))]
        assert zeromq_mechanisms(connected[1]) == {b"CURVE"}
        assert tokens_of(llm) == tokens_of_one_rank(model())


def zeromq_mechanisms(node: RayNode) -> set[bytes]:
    """Return the security mechanisms of the ranks' ZeroMQ sockets on the node, from their ZMTP 3.0 greetings."""
    ranks = [f"pid={each.pid}," for each in node.processes("minisgl: engine rank")]
    listed = subprocess.run([*node.prefix, "ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout
    greeting = struct.pack(">B8xBBx20s32x", 0xFF, 0x7F, 3, b"CURVE")
    found = set()
    for line in listed.splitlines():
        host, _, port = line.split()[3].rpartition(":")
        if host == node.address and any(rank in line for rank in ranks):
            with socket.create_connection((host, int(port)), timeout=5) as peer, suppress(OSError):
                peer.sendall(greeting)
                answer = peer.makefile("rb").read(len(greeting))  # the greeting arrives in parts
                if len(answer) == len(greeting) and answer[:1] == greeting[:1]:  # a peer that disconnects sends less
                    found.add(answer[12:32].rstrip(b"\0"))
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, "needs bundles of 4 CPU, the first on this node.*--placement spread lets a stage span nodes"),
        ({"pp": 3, **ON_EACH}, "needs bundles of 1 CPU; 1 CPU; 1 CPU, the first on this node"),
    ],
)
@pytest.mark.usefixtures("connected")
def test_too_few_or_too_small_nodes_are_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MinisglError, match=message):
        load(tiny_folder.llama(), executor="ray", **options)
    assert {each["state"] for each in ray.util.placement_group_table().values()} == {"REMOVED"}


def test_spread_splits_a_stage_and_ranks_get_the_environment(
    connected: list[RayNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = {"MINISGL_TEST": "1", "HF_TEST": "2", "NCCL_TEST": "3", "OMP_NUM_THREADS": "2"}
    kept = {"MINISGL_API_KEY": "secret", "OTHER_TEST": "4"}
    for name, value in (copied | kept).items():
        monkeypatch.setenv(name, value)
    supervisor = Supervisor()
    executor = RayExecutor(supervisor.start, ExecutorSpec(tp=4, placement="spread", platform="cpu"))
    try:
        placements = executor.place(str(tmp_path))
        assert set(placements[0].nodes) == {node.address for node in connected}
        assert placements[0].nodes[0] == connected[0].address
        for each in placements:
            executor.start(f"rank {each.rank}", each, "rank_environment:write", str(tmp_path / f"{each.rank}"))
        assert supervisor.wait_ready(timeout_s=DEADLINE_S)
        for rank in range(1, 4):  # rank 0 is a child of this process
            environment = json.loads((tmp_path / f"{rank}").read_text())
            assert environment.items() >= copied.items()
            assert not environment.keys() & kept.keys()
    finally:
        supervisor.terminate()
        executor.close()


@pytest.mark.nightly
def test_without_an_address_the_launch_starts_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    # short, because of the paths of Ray's sockets
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        ray.shutdown()
        with load(tiny_folder.llama(), executor="ray", tp=2, pp=2) as llm:
            assert tokens_of(llm) == tokens_of_one_rank(tiny_folder.llama())
        left = [each for each in psutil.process_iter(["cmdline"]) if folder in " ".join(each.info["cmdline"] or ())]
        assert not psutil.wait_procs(left, 30)[1]
