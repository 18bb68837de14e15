"""A rank, a node or a connection is lost: every request gets its final event, and the launch ends completely."""

from __future__ import annotations

import json
import re
import signal
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
    """Launch on the first host, with one pipeline stage per host."""

    def __init__(self, node: RayNode) -> None:
        flags = "--pp 2 --placement strict-spread --num-pages 20000"
        super().__init__(node, *flags.split(), "--host", node.address, "--model", tiny_folder.llama())
        self.read_banner("curl ")
        self.url = re.search(r"Serving at (\S+)", self.banner)[1]  # type: ignore[index]

    def stream(self, started: threading.Semaphore) -> list[str]:
        """Return the events of one long request."""
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
def launch(nodes: list[RayNode]) -> Iterator[Launch]:
    made = Launch(nodes[0])
    yield made
    made.close()


def kill_rank(hosts: Hosts, nodes: list[RayNode]) -> None:
    nodes[1].processes("minisgl: engine rank 1")[0].kill()


def kill_actor(hosts: Hosts, nodes: list[RayNode]) -> None:
    nodes[1].processes("RankActor")[0].kill()


def kill_raylet(hosts: Hosts, nodes: list[RayNode]) -> None:
    nodes[1].processes("/raylet/raylet")[0].kill()


def kill_head(hosts: Hosts, nodes: list[RayNode]) -> None:
    nodes[0].processes("/gcs_server")[0].kill()


def cut_cable(hosts: Hosts, nodes: list[RayNode]) -> None:
    hosts.cut(1)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_launch_leaves_nothing(number: int, launch: Launch, nodes: list[RayNode]) -> None:
    assert f"rank 0 on {nodes[0].address}, rank 1 on {nodes[1].address}" in launch.banner
    running = launch.processes(*nodes)
    launch.process.send_signal(number)
    assert launch.process.wait(DEADLINE_S) == (0 if number == signal.SIGTERM else -number), launch.stderr()
    assert not psutil.wait_procs(running, DEADLINE_S)[1]


def nightly(fault: Callable[[Hosts, list[RayNode]], None]) -> Any:
    return pytest.param(fault, marks=pytest.mark.nightly)


@pytest.mark.parametrize("fault", [kill_rank, *map(nightly, (kill_actor, cut_cable, kill_raylet, kill_head))])
def test_requests_end_and_no_process_is_left(
    fault: Callable[[Hosts, list[RayNode]], None],
    launch: Launch,
    hosts: Hosts,
    nodes: list[RayNode],
    start_node: Callable[..., RayNode],
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = threading.Semaphore(0)
    running = launch.processes(*nodes)
    assert len(running) > 4
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        streams = [pool.submit(launch.stream, started) for _ in range(NUM_REQUESTS)]
        for _ in streams:
            assert started.acquire(timeout=DEADLINE_S)
        begin = time.monotonic()
        try:
            fault(hosts, nodes)
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
    gone = psutil.wait_procs(running, DEADLINE_S)[1]
    assert not gone, gone
    print(launch.stderr())
    if fault is kill_raylet:
        nodes[1] = start_node(1).wait_started()
    if fault is kill_head:
        for each in nodes:
            each.stop()
        nodes[:] = [each.wait_started() for each in (start_node(0), start_node(1))]
