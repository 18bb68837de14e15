"""Faults under two replicas, one per node: only requests that have started there end, with an error, and replicas return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import pytest
import tiny_folder
from hosts import Hosts
from launched import DEADLINE_S
from many_streams import count_errors
from ray_node import RayNode
from serve_launch import Launch, Service, engines, wait_for_two_replicas

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

NUM_STREAMS = 1000
PROMPTS = [f"w{number} w9 w{number + 7}" for number in range(5, 45)]
NUM_TOKENS = 4_000
"""Output tokens of long streams, which run during the fault."""
CUT_S = 20.0


@pytest.fixture(scope="module")
def narrow(nodes: list[RayNode], start_node: Callable[..., RayNode]) -> Iterator[list[RayNode]]:
    """Cluster whose second node has room for one replica, but not for the API."""
    nodes[1].stop()
    nodes[1] = start_node(1, num_cpus=1).wait_started()
    yield nodes
    nodes[1].stop()
    nodes[1] = start_node(1).wait_started()


@pytest.fixture
def launch(narrow: list[RayNode]) -> Iterator[Launch]:
    """Two replicas, one per node."""
    flags = "--replicas 2 --router least-loaded --max-queued-requests 2000 --num-pages 90000"
    while True:
        made = Launch(narrow[0], *flags.split(), "--model", tiny_folder.llama()).wait_started()
        if [len(engines(node)) for node in narrow] == [1, 1]:
            break
        made.close()  # Ray spreads actors if possible, but does not guarantee it
    yield made
    made.close()


@dataclass
class Report:
    """Prints the seconds since the fault. No assertion uses them, as machines differ."""

    capsys: pytest.CaptureFixture[str]
    begin: float = field(default_factory=time.monotonic)

    def __call__(self, event: str) -> None:
        with self.capsys.disabled():
            print(f"\n{event} after {time.monotonic() - self.begin:.1f} s")


def test_all_streams_end_with_their_own_text_or_one_error(
    launch: Launch, nodes: list[RayNode], start_node: Callable[..., RayNode], capsys: pytest.CaptureFixture[str]
) -> None:
    kill = nodes[1].processes("/raylet/raylet")[0].kill
    try:
        num_errors = count_errors(launch.url.removesuffix("/v1"), PROMPTS, NUM_STREAMS, kill, max_tokens=100)
    finally:
        nodes[1] = start_node(1, num_cpus=1).wait_started()
    assert 0 < num_errors < NUM_STREAMS // 2
    report = Report(capsys)
    wait_for_two_replicas(launch, nodes)
    report(f"{num_errors} of {NUM_STREAMS} streams ended with an error; two replicas")


def test_a_disconnected_node_ends_the_streams_that_run_on_it(
    launch: Launch, nodes: list[RayNode], hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(launch.stream, started, NUM_TOKENS) for _ in range(8)]
        for _ in streams:
            assert started.acquire(timeout=DEADLINE_S)
        report = Report(capsys)
        hosts.cut(1)
        try:
            later = [pool.submit(launch.client.completions.create, model="m", prompt=each) for each in PROMPTS[:8]]
            time.sleep(CUT_S)
            ends = [each.result(0)[-1] for each in streams if each.done()]
            report(f"{len(ends)} streams {set(ends)}")
        finally:
            hosts.join(1)
        joined = Report(capsys)
        assert "replica_lost" in ends
        assert {each.result(DEADLINE_S)[-1] for each in streams} == {"length", "replica_lost"}
        assert all(each.result(DEADLINE_S).choices[0].text for each in later)
    wait_for_two_replicas(launch, nodes)
    joined("two replicas answer")


def test_the_loss_of_the_head_ends_streams_and_the_launch(
    launch: Launch, nodes: list[RayNode], start_node: Callable[..., RayNode], capsys: pytest.CaptureFixture[str]
) -> None:
    started = threading.Semaphore(0)
    running = [*launch.processes(*nodes), *(each for node in nodes for each in node.processes("ServeReplica"))]
    other = Service()  # through the proxy of the second node
    other.connect(launch.url.replace(nodes[0].address, nodes[1].address))
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(launch.stream, started, NUM_TOKENS) for _ in range(4)]
        others = [pool.submit(other.stream, started, NUM_TOKENS) for _ in range(4)]
        for _ in (*streams, *others):
            assert started.acquire(timeout=DEADLINE_S)
        report = Report(capsys)
        nodes[0].processes("/gcs_server")[0].kill()
        # Ray ends the proxy of the head's node, which closes the connections, before or after the replica of the API.
        assert {each.result(DEADLINE_S)[-1] for each in streams} <= {"APIConnectionError", "replica_lost"}
        report("the last stream through the head ended")
        ends = {each.result(DEADLINE_S)[-1] for each in others}
        report(f"the last stream through the other node ended; {ends}")
        assert ends <= {"replica_lost", "engine_stopped"}
        assert launch.process.wait(DEADLINE_S) == 1
        report("the launch ended")
    assert "The head of the Ray cluster has not answered" in launch.stderr()
    assert not psutil.wait_procs(running, 2 * DEADLINE_S)[1]
    report("the last process ended")
    for node in nodes:
        node.stop()
    nodes[:] = [each.wait_started() for each in (start_node(0), start_node(1, num_cpus=1))]


def test_streams_of_other_nodes_end_before_their_processes(
    narrow: list[RayNode], start_node: Callable[..., RayNode], capsys: pytest.CaptureFixture[str]
) -> None:
    for node in narrow:
        node.stop()
    nodes = [each.wait_started() for each in (start_node(0, num_cpus=0), start_node(1))]
    launch = Launch(nodes[0], "--replicas", "2", "--model", tiny_folder.llama()).wait_started()
    try:
        assert [len(engines(node)) for node in nodes] == [0, 2]
        launch.connect(launch.url.replace(nodes[0].address, nodes[1].address))
        started = threading.Semaphore(0)
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(launch.stream, started, NUM_TOKENS) for _ in range(4)]
            for _ in streams:
                assert started.acquire(timeout=DEADLINE_S)
            for each in engines(nodes[1]):
                each.suspend()  # otherwise the streams would end
            report = Report(capsys)
            nodes[0].processes("/gcs_server")[0].kill()
            assert {each.result(DEADLINE_S)[-1] for each in streams} == {"engine_stopped"}
            report("the last stream ended")
        assert launch.process.wait(DEADLINE_S) == 1
    finally:
        launch.close()
        for node in nodes:
            node.stop()
        narrow[:] = [each.wait_started() for each in (start_node(0), start_node(1, num_cpus=1))]
