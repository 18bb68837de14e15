"""Replicas on a Ray cluster by Ray Serve: ``minisgl launch --executor ray --replicas``."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import tiny_folder
from launched import DEADLINE_S
from ray_node import RayNode
from serve_launch import Launch

pytest.importorskip("ray", reason="ray is not installed")

QUESTION: Any = [{"role": "user", "content": "What is the capital of Germany?"}]


@pytest.fixture(scope="module")
def launch(node: RayNode) -> Iterator[Launch]:
    made = Launch(node, "--replicas", "2").wait_started()
    yield made
    made.close()


def schedulers() -> list[psutil.Process]:
    """Processes of engines on this host."""
    listed = psutil.process_iter(["cmdline"])
    return [each for each in listed if "minisgl: scheduler rank 0" in " ".join(each.info["cmdline"] or ())]


def test_streams_of_the_openai_client_are_the_text_of_one_engine(launch: Launch) -> None:
    from minisgl_core import LLM, SamplingParams

    with LLM(platform="cpu", dtype="float32", num_pages=200) as llm:
        expected = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=24))[0].text

    def ask(_: int) -> str:
        stream = launch.client.chat.completions.create(
            model="m", messages=QUESTION, temperature=0, max_tokens=24, stream=True
        )
        return "".join(event.choices[0].delta.content or "" for event in stream)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(6))) == {expected}


def test_metrics_have_the_replicas_of_the_cluster(launch: Launch) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: launch.stream(threading.Semaphore(), 16), range(6)))
    text = httpx.get(launch.url.removesuffix("/v1") + "/metrics").raise_for_status().text
    counts = re.findall(r'minisgl_generation_tokens_total\{model_name="m",replica="(\w+)"\} ([\d.]+)', text)
    assert len(dict(counts)) == 2, text[:2000]
    assert sum(float(count) for _, count in counts) >= 6 * 16


def test_a_lost_replica_costs_only_the_streams_that_have_begun_on_it(launch: Launch) -> None:
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
        before = schedulers()
        before[0].kill()
        ends = [stream.result(DEADLINE_S)[-1] for stream in streams]
        assert set(ends) <= {"length", "replica_lost"}
        for each in whole:
            assert each.result(DEADLINE_S).usage.completion_tokens > 0
    deadline = time.monotonic() + DEADLINE_S
    while len(schedulers()) < len(before) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len(schedulers()) == len(before)
    assert launch.stream(started, 4)[-1] == "length"


@pytest.mark.nightly
def test_an_update_to_another_model_loses_no_request(launch: Launch, node: RayNode) -> None:
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
        update = Launch(node, "--replicas", "2", "--model", tiny_folder.llama())
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
            assert not psutil.wait_procs(schedulers(), DEADLINE_S)[1]
        finally:
            stop.set()
            update.close()
