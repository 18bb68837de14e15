"""Replicas on a Ray cluster by Ray Serve: ``minisgl launch --executor ray --replicas``."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import tiny_folder
from launched import DEADLINE_S
from ray_node import RayNode
from serve_launch import Launch

from minisgl_core import LLM, SamplingParams

pytest.importorskip("ray", reason="ray is not installed")

PROMPTS = ["w5 w9", "w5 w9 w7", "w40 w41 w42 w43", "w5 w9 w8"]


@pytest.fixture(scope="module")
def launch(nodes: list[RayNode]) -> Iterator[Launch]:
    made = Launch(nodes[0], "--replicas", "2", "--model", tiny_folder.llama()).wait_started()
    yield made
    made.close()


def schedulers(nodes: list[RayNode]) -> list[psutil.Process]:
    """Processes of engines."""
    return [each for node in nodes for each in node.processes("minisgl: scheduler rank 0")]


def test_streams_of_two_replicas_are_the_text_of_one_engine(launch: Launch, nodes: list[RayNode]) -> None:
    with LLM(tiny_folder.llama(), platform="cpu", dtype="float32", num_pages=200) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    expected = [output.text for output in outputs]
    assert [len(node.processes("minisgl: scheduler rank 0")) for node in nodes] == [1, 1]

    def stream(prompt: str) -> str:
        *pieces, finish_reason = launch.stream(threading.Semaphore(0), 24, prompt)
        assert finish_reason == "length"
        return "".join(pieces)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(stream, 2 * PROMPTS)) == 2 * expected


def test_metrics_have_the_replicas_of_the_cluster(launch: Launch) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: launch.stream(threading.Semaphore(), 16), range(6)))
    text = httpx.get(launch.url.removesuffix("/v1") + "/metrics").raise_for_status().text
    counts = re.findall(r'minisgl_generation_tokens_total\{model_name="m",replica="(\w+)"\} ([\d.]+)', text)
    assert len(dict(counts)) == 2, text[:2000]
    assert sum(float(count) for _, count in counts) >= 6 * 16


@pytest.mark.nightly
def test_a_lost_replica_costs_only_the_streams_that_have_begun_on_it(launch: Launch, nodes: list[RayNode]) -> None:
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
        before = schedulers(nodes)
        before[0].kill()
        ends = [stream.result(DEADLINE_S)[-1] for stream in streams]
        assert set(ends) <= {"length", "replica_lost"}
        for each in whole:
            assert each.result(DEADLINE_S).usage.completion_tokens > 0
    deadline = time.monotonic() + DEADLINE_S
    while len(schedulers(nodes)) < len(before) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len(schedulers(nodes)) == len(before)
    assert launch.stream(started, 4)[-1] == "length"


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
        update = Launch(nodes[0], "--replicas", "2", "--model", tiny_folder.llama())
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
            assert new.split() == re.findall(r"w\d+", new)  # of the second model, which knows such words only
            assert set(texts) == {old, new}
            assert old != new
            last = pool.submit(launch.stream, started, 600)
            assert started.acquire(timeout=DEADLINE_S)
            update.process.terminate()
            assert last.result(DEADLINE_S)[-1] == "length"
            assert update.process.wait(DEADLINE_S) == 0, update.stderr()
            assert not psutil.wait_procs(schedulers(nodes), DEADLINE_S)[1]
        finally:
            stop.set()
            update.close()
