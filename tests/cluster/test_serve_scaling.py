"""Autoscaling of replicas, and replicas with pipeline stages, on a Ray cluster with Ray Serve."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
import tiny_folder
from launched import DEADLINE_S
from ray_node import RayNode
from serve_launch import Launch, Service, engines, wait_for_engines

from minisgl_core import LLM, SamplingParams

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.nightly

PROMPTS = ["w5 w9", "w5 w9 w7", "w40 w41 w42 w43", "w5 w9 w8"]
NUM_TOKENS = 200


@lru_cache
def texts_of_one_engine() -> list[str]:
    with LLM(tiny_folder.llama(), platform="cpu", dtype="float32", num_pages=2000) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    return [output.text for output in outputs]


def stream(service: Service, number: int) -> None:
    """Check the text of one stream."""
    index = number % len(PROMPTS)
    assert service.texts([PROMPTS[index]], NUM_TOKENS) == [texts_of_one_engine()[index]]


@pytest.fixture
def scaled(nodes: list[RayNode]) -> Iterator[Service]:
    """Application of a Serve config file that scales faster than by default."""
    from ray import serve

    from minisgl_server.ray import build_app

    ray.init(nodes[0].head, logging_level="WARNING")
    with socket.create_server(("0.0.0.0", 0)) as probe:
        port = probe.getsockname()[1]
    serve.shutdown()  # after a launch, it would keep its own port
    serve.start(proxy_location="EveryNode", http_options={"host": "0.0.0.0", "port": port})
    args = {
        "model": tiny_folder.llama(),
        "dtype": "float32",
        "platform": "cpu",
        "num_pages": 8000,
        "max_running_requests": 2,
        "served_model_name": "m",
        "replicas": "1:2",
        "host": "0.0.0.0",
        "autoscaling": {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 2, "metrics_interval_s": 1},
    }
    serve.run(build_app(args), name="minisgl", route_prefix="/")
    service = Service()
    service.connect(f"http://{nodes[0].address}:{port}/v1")
    yield service
    serve.shutdown()
    ray.shutdown()


def test_replicas_follow_the_load_and_no_request_is_lost(scaled: Service, nodes: list[RayNode]) -> None:
    wait_for_engines(nodes, 1)
    is_over, is_low = threading.Event(), threading.Event()

    def ask(number: int) -> int:
        count = 0
        while not (is_over.is_set() or (number and is_low.is_set())):
            stream(scaled, number)
            count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        try:
            wait_for_engines(nodes, 2)
            while len(scaled.generated_tokens()) < 2:
                assert not any(each.done() for each in asking)
            is_low.set()  # one of them is still running
            wait_for_engines(nodes, 1)
        finally:
            is_over.set()
        assert all(each.result(DEADLINE_S) > 0 for each in asking)
    stream(scaled, 0)


@pytest.mark.parametrize(
    ("address", "model", "message"),
    [
        (
            None,
            "/no/such/model",
            "minisgl: The replicas did not start: --model='/no/such/model': there is no such file",
        ),
        ("ray://127.0.0.1:1", "m", "minisgl: the executor provider 'ray' cannot be used here: RAY_ADDRESS=ray://"),
    ],
)
def test_startup_errors_are_one_line(
    nodes: list[RayNode], monkeypatch: pytest.MonkeyPatch, address: str | None, model: str, message: str
) -> None:
    if address:
        monkeypatch.setattr(nodes[0], "head", address)
    launch = Launch(nodes[0], "--replicas", "2", "--model", model)
    try:
        assert launch.process.wait(2 * DEADLINE_S) != 0
        assert launch.stderr().splitlines()[-1].startswith(message)
    finally:
        launch.close()


def test_replicas_with_stages_on_two_hosts(nodes: list[RayNode]) -> None:
    flags = "--replicas 2 --pp 2 --placement strict-spread --max-running-requests 16"
    launch = Launch(nodes[0], *flags.split(), "--model", tiny_folder.llama()).wait_started()
    try:
        assert [len(node.processes("RankActor")) for node in nodes] == [2, 2]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(stream, [launch] * 8, range(8)))
            assert len(launch.generated_tokens()) == 2
            started = threading.Semaphore(0)
            streams = [pool.submit(launch.stream, started, 2000) for _ in range(8)]
            for _ in streams:
                assert started.acquire(timeout=DEADLINE_S)
            before = [each for node in nodes for each in engines(node)]
            ranks = [each for node in nodes for each in node.processes("minisgl: engine rank 1")]
            remote = [each for each in ranks if "RankActor" in " ".join(each.parent().cmdline())]
            assert len(remote) == 2
            remote[0].kill()
            assert {each.result(DEADLINE_S)[-1] for each in streams} == {"length", "replica_lost"}
            wait_for_engines(nodes, 2, other_than=before)
            list(pool.map(stream, [launch] * 8, range(8)))
    finally:
        launch.close()
    wait_for_engines(nodes, 0)
