"""Replicas on a Ray cluster with Ray Serve: ``minisgl launch --executor ray --replicas``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import openai
import psutil
import pytest
import tiny
import tiny_folder
from launched import DEADLINE_S
from ray_node import RayNode
from serve_launch import Launch, Service, engines, wait_for_engines, wait_for_two_replicas

from minisgl_core import LLM, SamplingParams
from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import InvalidValueError

pytest.importorskip("ray", reason="ray is not installed")

PROMPTS = ["w5 w9", "w5 w9 w7", "w40 w41 w42 w43", "w5 w9 w8"]
NUM_RUNNING, NUM_QUEUED = 4, 2
"""Running requests per replica, of which each takes twice as many, and requests that wait for a replica."""


@pytest.fixture(scope="module")
def launch(nodes: list[RayNode]) -> Iterator[Launch]:
    flags = f"--replicas 2 --max-running-requests {NUM_RUNNING} --max-queued-requests {NUM_QUEUED}"
    made = Launch(nodes[0], *flags.split(), "--model", tiny_folder.llama()).wait_started()
    yield made
    made.close()


@pytest.mark.parametrize(
    "options", [{"api_workers": 2, "response_store_size": 1000}, {"cors_origin": ["no-origin"]}], ids=str
)
def test_serve_config_files_are_checked_like_launch_options(options: dict[str, Any]) -> None:
    from minisgl_server.ray import build_app

    with pytest.raises(InvalidValueError, match=list(options)[-1].replace("_", "-")):
        build_app({"replicas": 2, **options})


@pytest.mark.parametrize(
    ("scaling", "found"),
    [
        ({"upscale_delay": 1}, r"autoscaling\.upscale_delay=1 .*Did you mean 'upscale_delay_s'"),
        ({"upscale_delay_s": -1}, "autoscaling=.*upscale_delay_s"),
        ({"max_replicas": 3}, r"autoscaling\.max_replicas=3 .*`replicas` sets"),
        (3, "autoscaling=3"),
    ],
    ids=str,
)
def test_invalid_autoscaling_fields_are_refused(scaling: Any, found: str) -> None:
    from minisgl_server.ray import build_app

    with pytest.raises(InvalidValueError, match=found):
        build_app({"replicas": 2, "autoscaling": scaling})


@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_accept_all_requests_that_serve_sends(overlap: bool) -> None:
    """An aborted request keeps its slot until the running step ends, while Serve sends the next one immediately."""
    from minisgl_server.ray.api import requests_per_replica
    from minisgl_server.ray.app import with_queue_of_serve

    given = EngineConfig.from_flat(model="m", max_running_requests=NUM_RUNNING, max_queued_requests=1)
    limits = with_queue_of_serve(given).scheduler
    loop = tiny.new_loop(
        page_size=1,
        num_pages=400,
        max_running_requests=limits.max_running_requests,
        max_queued_requests=limits.max_queued_requests,
        disable_overlap=not overlap,
    )
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for number in range(requests_per_replica(given)):
        tiny.submit(loop, f"r{number}", (5, number + 6), sampling)
    for _ in range(6):
        loop.step()
    loop.scheduler.abort("r1", "abort")
    tiny.submit(loop, "next", (5,), sampling)


def test_streams_of_two_replicas_equal_those_of_one_engine(launch: Launch, nodes: list[RayNode]) -> None:
    with LLM(tiny_folder.llama(), platform="cpu", dtype="float32", num_pages=200) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    expected = [output.text for output in outputs]
    assert [len(engines(node)) for node in nodes] == [1, 1]

    assert launch.texts(2 * PROMPTS, 24) == 2 * expected


def test_metrics_cover_all_replicas_of_the_cluster(launch: Launch) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: launch.stream(threading.Semaphore(), 16), range(6)))
    counts = launch.generated_tokens()
    assert len(counts) == 2
    assert sum(counts.values()) >= 6 * 16


def wait_for_requests(launch: Launch, num: int) -> None:
    """Wait until the API has `num` requests."""
    deadline = time.monotonic() + DEADLINE_S
    while (counts := httpx.get(f"{launch.root}/health/requests", timeout=DEADLINE_S).json())["router"] != num:
        assert time.monotonic() < deadline, counts
        time.sleep(0.1)


async def test_requests_are_refused_once_the_queue_is_full(launch: Launch) -> None:
    num_accepted = 2 * 2 * NUM_RUNNING + NUM_QUEUED
    body = {"model": "m", "prompt": "w5 w9", "max_tokens": 4000, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        post = partial(client.post, f"{launch.url}/completions")
        accepted = [
            asyncio.create_task(post(json={**body, "stream": bool(number % 2)})) for number in range(num_accepted)
        ]
        await asyncio.to_thread(wait_for_requests, launch, num_accepted)
        for is_stream in (True, False):
            refused = await post(json={**body, "stream": is_stream})
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert not any(each.done() for each in accepted)
        for each in accepted:
            each.cancel()
        await asyncio.to_thread(wait_for_requests, launch, 0)
        assert (await post(json={**body, "max_tokens": 4})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/completions", {"temperature": -1}, 400, {"type": "invalid_request_error", "param": "temperature"}),
        ("/completions", {"stream": True, "max_tokens": 10**6}, 400, {"code": "context_length_exceeded"}),
        (
            "/completions",
            {"n": 2 * 2 * NUM_RUNNING + NUM_QUEUED + 1},
            400,
            {"type": "invalid_request_error", "param": "n"},
        ),
        ("/completions", {"model": "other"}, 404, {"code": "model_not_found", "param": "model"}),
        ("/no_such_path", {}, 404, {"type": "invalid_request_error"}),
    ],
)
def test_errors_have_the_format_of_openai(
    launch: Launch, path: str, body: dict[str, Any], status: int, error: dict[str, Any]
) -> None:
    body = {"model": "m", "prompt": "w5 w9", **body}
    response = httpx.post(launch.url + path, json=body, timeout=DEADLINE_S)
    assert response.status_code == status
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found | error == found


def test_responses_have_one_request_id(launch: Launch) -> None:
    response = httpx.get(f"{launch.url}/models", headers={"X-Request-Id": "a"}, timeout=DEADLINE_S)
    assert response.headers.get_list("X-Request-Id") == ["a"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_disconnects_frees_its_request(launch: Launch, is_stream: bool) -> None:
    body = {"model": "m", "prompt": "w5 w9", "max_tokens": 4000, "ignore_eos": True, "stream": is_stream}
    begin = time.monotonic()
    tokens = sum(launch.generated_tokens().values())
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST", f"{launch.url}/completions", json=body, timeout=DEADLINE_S if is_stream else 1
        ) as response,
    ):
        next(response.iter_lines())
    while any(launch.metric("minisgl_num_requests_running").values()):
        assert time.monotonic() - begin < DEADLINE_S
        time.sleep(0.2)
    assert 0 < sum(launch.generated_tokens().values()) - tokens < 4000


@pytest.mark.nightly
def test_requests_of_a_session_run_on_one_replica(launch: Launch) -> None:
    def ask(session: str, number: int) -> None:
        prompt = " ".join(f"w{(7 * number + 3 * step) % 50 + 5}" for step in range(40))  # a unique prefix
        headers = {"X-Session-Id": session}
        launch.client.completions.create(model="m", prompt=prompt, max_tokens=8, extra_headers=headers)

    used = []
    with ThreadPoolExecutor(4) as pool:
        for session in [f"session {number}" for number in range(12)] * 2:
            before = launch.generated_tokens()
            list(pool.map(ask, [session] * 4, range(4)))
            after = launch.generated_tokens()
            used.append([replica for replica in after if after[replica] > before.get(replica, 0)])
    assert {len(each) for each in used} == {1}
    assert used[:12] == used[12:]
    assert len({replica for each in used for replica in each}) == 2


@pytest.mark.nightly
def test_a_lost_replica_ends_only_its_started_streams(launch: Launch, nodes: list[RayNode]) -> None:
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(launch.stream, started, 300) for _ in range(4)]
        for _ in streams:
            assert started.acquire(timeout=DEADLINE_S)
        whole = [
            pool.submit(launch.client.completions.create, model="m", prompt="w", max_tokens=40, extra_body={"seed": 1})
            for _ in range(4)
        ]
        time.sleep(0.3)
        engines(nodes[0])[0].kill()
        ends = [stream.result(DEADLINE_S)[-1] for stream in streams]
        assert set(ends) <= {"length", "replica_lost"}
        for each in whole:
            assert each.result(DEADLINE_S).usage.completion_tokens > 0
    wait_for_two_replicas(launch, nodes)


@pytest.mark.nightly
def test_replicas_with_hung_schedulers_are_replaced(launch: Launch, nodes: list[RayNode]) -> None:
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_RUNNING) as pool:
        streams = [pool.submit(launch.stream, started, 4000) for _ in range(NUM_RUNNING)]
        for _ in streams:
            assert started.acquire(timeout=DEADLINE_S)
        before = [each for node in nodes for each in engines(node)]
        for each in before:  # the router decides where the streams run
            each.suspend()
        assert {each.result(DEADLINE_S)[-1] for each in streams} == {"replica_lost"}
        assert not psutil.wait_procs(before, DEADLINE_S)[1]
    wait_for_two_replicas(launch, nodes)


@pytest.mark.nightly
def test_an_update_to_another_model_loses_no_request(launch: Launch, nodes: list[RayNode]) -> None:
    started, stop = threading.Semaphore(0), threading.Event()
    texts: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            response = launch.client.completions.create(model="m", prompt="w5 w9", max_tokens=4, temperature=0)
            texts.append(response.choices[0].text)

    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(launch.stream, started, 600)
        assert started.acquire(timeout=DEADLINE_S)
        asking = [pool.submit(ask) for _ in range(2)]
        update = Launch(nodes[0], "--replicas", "2", "--model", tiny_folder.qwen3_moe())
        try:
            update.wait_started()
            assert launch.process.wait(DEADLINE_S) == 0, launch.stderr()
            assert stream.result(DEADLINE_S)[-1] == "length"
            time.sleep(1)
            stop.set()
            for each in asking:
                each.result(DEADLINE_S)
            assert update.url == launch.url
            old, new = texts[0], texts[-1]
            assert set(texts) == {old, new}
            assert old != new
            last = pool.submit(launch.stream, started, 240)
            assert started.acquire(timeout=DEADLINE_S)
            update.process.terminate()
            assert last.result(DEADLINE_S)[-1] == "length"
            assert update.process.wait(DEADLINE_S) == 0, update.stderr()
            wait_for_engines(nodes, 0)
        finally:
            stop.set()
            update.close()


@pytest.mark.nightly
def test_the_cluster_serves_after_the_api_or_launch_is_killed(nodes: list[RayNode]) -> None:
    started = threading.Semaphore(0)
    flags = ("--replicas", "2", "--model", tiny_folder.llama())
    first = Launch(nodes[0], *flags).wait_started()
    try:
        with ThreadPoolExecutor(2) as pool:
            stream = pool.submit(first.stream, started, 2000)
            whole = pool.submit(
                first.client.completions.create, model="m", prompt="w", extra_body={"min_tokens": 2000}, max_tokens=2000
            )
            assert started.acquire(timeout=DEADLINE_S)
            time.sleep(0.3)
            [api] = [each for node in nodes for each in node.processes("ServeReplica:minisgl:API")]
            api.kill()
            assert stream.result(DEADLINE_S)[-1] == "replica_lost"
            with pytest.raises(openai.InternalServerError) as error:
                whole.result(DEADLINE_S)
            assert (error.value.status_code, error.value.code) == (503, "replica_lost")
        deadline = time.monotonic() + DEADLINE_S
        while first.stream(started, 4)[-1] != "length":
            assert time.monotonic() < deadline
            time.sleep(0.5)
        first.process.kill()
        first.process.wait()
        assert first.stream(started, 4)[-1] == "length"
    finally:
        last = Launch(nodes[0], *flags).wait_started()
        try:
            assert last.url == first.url
            assert sum(len(engines(node)) for node in nodes) == 2
        finally:
            last.close()
    wait_for_engines(nodes, 0)


@pytest.mark.nightly
def test_a_killed_api_worker_ends_only_its_streams(nodes: list[RayNode]) -> None:
    """Serve's proxies prefer the API worker of their node."""

    def workers() -> list[list[psutil.Process]]:
        return [node.processes("ServeReplica:minisgl:API") for node in nodes]

    started = threading.Semaphore(0)
    flags = ("--replicas", "2", "--api-workers", "2")
    launch = Launch(nodes[0], *flags, "--model", tiny_folder.llama()).wait_started()
    try:
        assert [len(each) for each in workers()] == [1, 1]
        other = Service()  # through the proxy of the second node
        other.connect(launch.url.replace(nodes[0].address, nodes[1].address))
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(each.stream, started, 1000) for each in 4 * (launch, other)]
            for _ in streams:
                assert started.acquire(timeout=DEADLINE_S)
            workers()[1][0].kill()
            ended = [each.result(DEADLINE_S) for each in streams]
        assert [end for *_, end in ended] == 4 * ["length", "replica_lost"]
        assert len({"".join(pieces) for *pieces, end in ended if end == "length"}) == 1
        deadline = time.monotonic() + DEADLINE_S
        while sum(map(len, workers())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert other.stream(started, 4)[-1] == "length"
    finally:
        launch.close()
