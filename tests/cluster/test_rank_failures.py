"""A rank, a node or a connection is lost: every request gets its final event, the launch ends, and nothing is left."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import tiny_folder
from hosts import Hosts
from launched import DEADLINE_S, Launched
from ray_node import RayNode

pytest.importorskip("ray", reason="ray is not installed")

NUM_REQUESTS = 4


class Launch(Launched):
    """A launch on the first host, with a pipeline stage on each."""

    def __init__(self, node: RayNode) -> None:
        flags = "--pp 2 --placement strict-spread --num-pages 20000"
        super().__init__(node, *flags.split(), "--host", node.address, "--model", tiny_folder.llama())
        self.read_banner("curl ")
        self.url = re.search(r"Serving at (\S+)", self.banner)[1]  # type: ignore[index]

    def stream(self, started: threading.Semaphore) -> list[str]:
        """Events of one long request."""
        body = {"prompt": "w5 w9", "max_tokens": 8_000, "temperature": 0, "ignore_eos": True, "stream": True}
        events: list[str] = []
        with httpx.stream("POST", f"{self.url}/completions", json=body, timeout=DEADLINE_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    if not events:
                        started.release()
                    events.append(line.removeprefix("data: "))
        return events


@pytest.fixture
def launch(two_nodes: list[RayNode]) -> Iterator[Launch]:
    made = Launch(two_nodes[0])
    yield made
    made.close()


def ours(hosts: Hosts) -> list[psutil.Process]:
    """Ranks, their actors and the processes of the launch, on both hosts."""
    found = []
    for process in (*hosts.processes(0), *hosts.processes(1)):
        try:
            if "minisgl" in " ".join(process.cmdline()) or "RankActor" in process.cmdline()[0]:
                found.append(process)
        except (psutil.NoSuchProcess, IndexError):
            pass
    return found


def kill_rank(hosts: Hosts, node: RayNode) -> None:
    next(each for each in hosts.processes(1) if "scheduler rank 1" in " ".join(each.cmdline())).kill()


def kill_actor(hosts: Hosts, node: RayNode) -> None:
    next(each for each in hosts.processes(1) if "RankActor" in " ".join(each.cmdline())).kill()


def kill_raylet(hosts: Hosts, node: RayNode) -> None:
    next(each for each in node.processes() if each.name() == "raylet").kill()


def kill_head(hosts: Hosts, node: RayNode) -> None:
    next(each for each in hosts.processes(0) if each.name() == "gcs_server").kill()


def cut_cable(hosts: Hosts, node: RayNode) -> None:
    hosts.cut(1)


@pytest.mark.nightly
def test_a_launch_that_is_stopped_leaves_nothing(launch: Launch, hosts: Hosts) -> None:
    assert f"rank 0 on {hosts.addresses[0]}, rank 1 on {hosts.addresses[1]}" in launch.banner
    launch.process.terminate()
    assert launch.process.wait(DEADLINE_S) == 0, launch.stderr()
    assert not psutil.wait_procs(ours(hosts), DEADLINE_S)[1]


@pytest.mark.nightly
def test_a_launch_that_is_killed_leaves_nothing(launch: Launch, hosts: Hosts) -> None:
    launch.process.kill()
    assert not psutil.wait_procs(ours(hosts), DEADLINE_S)[1]


def nightly(fault: Callable[[Hosts, RayNode], None]) -> Any:
    return pytest.param(fault, marks=pytest.mark.nightly)


@pytest.mark.parametrize("fault", [nightly(kill_rank), nightly(kill_actor), cut_cable, kill_raylet, nightly(kill_head)])
def test_requests_end_and_no_process_stays(
    fault: Callable[[Hosts, RayNode], None],
    launch: Launch,
    hosts: Hosts,
    two_nodes: list[RayNode],
    make_node: Callable[..., RayNode],
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = threading.Semaphore(0)
    assert len(ours(hosts)) > 4
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        streams = [pool.submit(launch.stream, started) for _ in range(NUM_REQUESTS)]
        for _ in streams:
            assert started.acquire(timeout=DEADLINE_S)
        begin = time.monotonic()
        try:
            fault(hosts, two_nodes[1])
            ends = [stream.result(DEADLINE_S) for stream in streams]
            elapsed_s = time.monotonic() - begin
        finally:
            if fault is cut_cable:
                hosts.join(1)
    for events in ends:
        assert json.loads(events[-1])["error"]["code"] == "engine_stopped", events[-1]
        assert all("error" not in json.loads(event) for event in events[:-1])
    with capsys.disabled():
        print(f"\n{fault.__name__}: the last of {NUM_REQUESTS} requests ended after {elapsed_s:.1f} s")
    assert launch.process.wait(DEADLINE_S) != 0
    gone = psutil.wait_procs(ours(hosts), DEADLINE_S)[1]
    assert not gone, gone
    print(launch.stderr())
    if fault is kill_raylet:
        two_nodes[1] = make_node(two_nodes[0].head, hosts.addresses[1], prefix=hosts.on(1), num_cpus=2).wait_started()
