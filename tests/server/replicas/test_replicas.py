"""Two replicas behind one API: tokens, prefix affinity, and the loss of a replica."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import openai
import pytest

from minisgl_core import LLM, SamplingParams

pytestmark = pytest.mark.slow

Launch = Callable[..., Any]
PROMPTS = [f"{word} " * 40 for word in ("apple", "river", "stone", "cloud", "music", "paper")]


@pytest.fixture(scope="module")
def server(launch_shared: Launch, tiny_checkpoint: Path) -> Any:
    """Server shared by all tests, as restarts leave it unchanged."""
    flags = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--num-pages", "1100", "--attn", "torch"]
    return launch_shared(*flags, "--replicas", "2", "--max-running-requests", "2", OMP_NUM_THREADS="1").wait_started()


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as made:
        yield made


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def complete(client: openai.OpenAI, prompt: str, max_tokens: int = 12) -> str:
    body = {"ignore_eos": True}
    done = client.completions.create(
        model=model(client), prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=body
    )
    return done.choices[0].text


def metric(server: Any, name: str) -> list[float]:
    """Return the values of a metric by replica."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = dict(re.findall(rf'^minisgl_{name}\{{.*replica="(\d)".*\}} (\S+)$', text, re.M))
    return [float(found[replica]) for replica in sorted(found)]


def replicas(server: Any) -> list[dict[str, Any]]:
    return httpx.get(f"{server.url}/engine/state", timeout=60).json()["replicas"]  # type: ignore[no-any-return]


def wait_for(condition: Callable[[], bool], limit_s: float = 100) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tokens_equal_those_of_one_engine(server: Any, client: openai.OpenAI, tiny_checkpoint: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(tiny_checkpoint), dtype="float32", attn="torch", num_pages=1100) as llm:
        expected = [output.text for output in llm.generate(PROMPTS, greedy)]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: complete(client, prompt), PROMPTS)) == expected
    assert all(num > 0 for num in metric(server, "generation_tokens_total")), "both replicas ran requests"


def test_repeated_prompts_are_routed_to_their_prefix(server: Any, client: openai.OpenAI) -> None:
    for number in range(8):
        complete(client, f"number {number} " * 30, 2)  # new prefixes alternate between idle replicas
    before = metric(server, "prefix_cache_hits_total")
    queried = metric(server, "prefix_cache_queries_total")
    for _ in range(3):
        for number in range(8):
            complete(client, f"number {number} " * 30, 2)
    hits = [now - then for now, then in zip(metric(server, "prefix_cache_hits_total"), before, strict=True)]
    queries = [now - then for now, then in zip(metric(server, "prefix_cache_queries_total"), queried, strict=True)]
    assert min(queries) > 0, "both replicas hold some of the prompts"
    assert sum(hits) > 0.8 * sum(queries)


def stream(server: Any, prompt: str, max_tokens: int, started: Callable[[], None] = lambda: None) -> list[Any]:
    """Return the events of a streamed completion; `started` is called after the first."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    found: list[Any] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=200) as answer:
        for line in filter(None, answer.iter_lines()):
            data = line.removeprefix("data: ") if answer.status_code == 200 else line
            found.append(data if data == "[DONE]" else json.loads(data))
            if len(found) == 1:
                started()
    return found


def text_of(found: list[Any]) -> str:
    return "".join(each["choices"][0]["text"] for each in found[:-1])


def test_a_killed_replica_ends_only_its_started_streams(server: Any, client: openai.OpenAI) -> None:
    """When a replica is killed, each replica runs two streams and queues two."""
    prompts, max_tokens = [f"{number} bottles of" for number in range(8)], 500
    expected = {prompt: text_of(stream(server, prompt, max_tokens)) for prompt in (prompts[0], prompts[7])}
    num_starts = [each["num_starts"] for each in replicas(server)]
    started = Semaphore(0)
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(stream, server, prompt, max_tokens, started.release) for prompt in prompts]
        for _ in range(3):  # each replica runs two streams, so one of these is on the replica that is killed
            started.acquire()
        # These two have generated tokens or wait, and their clients have received nothing.
        whole = [pool.submit(complete, client, prompt, max_tokens) for prompt in prompts[:2]]
        wait_for(lambda: sum(each["num_requests"] for each in replicas(server)) == 10)
        server.children()["replica 0 rank 0"].kill()
        ended = [answer.result() for answer in answers]
        assert whole[0].result() == expected[prompts[0]]
        assert len(whole[1].result()) > 100
    failed = [each for each in ended if each[-1] != "[DONE]"]
    assert 1 <= len(failed) <= 2
    for each in failed:
        assert each[-1]["error"]["code"] == "replica_lost"
        assert len(each) > 1, "a stream that had sent nothing is retried"
        assert sum("error" in event for event in each) == 1
    for prompt, each in zip(prompts, ended, strict=True):
        if each[-1] == "[DONE]":
            assert each[-2]["choices"][0]["finish_reason"] == "length"
            assert text_of(each) == expected.get(prompt, text_of(each))
    wait_for(lambda: all(each["is_ready"] for each in replicas(server)))
    assert [each["num_starts"] for each in replicas(server)] == [num_starts[0] + 1, num_starts[1]]
    before = replicas(server)[0]["num_routed"]
    for number in range(3):
        complete(client, f"after {number}", 2)
    assert replicas(server)[0]["num_routed"] > before, "the new engine serves"
    counts = httpx.get(f"{server.url}/health/requests", timeout=60).json()
    assert set(counts.values()) == {0}, counts
