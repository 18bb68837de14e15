"""Several API workers behind one port: one engine, shared limits and metrics, and the death of a worker."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from minisgl_core.errors import InvalidValueError
from minisgl_server.launch.api_workers import check_api_workers
from minisgl_server.options import ServerOptions

Launch = Callable[..., Any]
NUM = 2
pytestmark = pytest.mark.slow
PROMPTS = [f"{number} bottles of beer" for number in range(12)]


@pytest.fixture(scope="module")
def server(launch_shared: Launch, tiny_checkpoint: Path) -> Any:
    """Server shared by all tests, as restarts leave it unchanged."""
    flags = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--num-pages", "1100", "--attn", "torch"]
    flags += ["--api-workers", str(NUM), "--max-concurrent-requests", "12"]
    return launch_shared(*flags, OMP_NUM_THREADS="1").wait_started()


def wait_for(condition: Callable[[], Any], limit_s: float = 100) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def client_of(server: Any, worker: int, stack: ExitStack) -> httpx.Client:
    """Return a client whose connection is with this worker."""
    while True:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=100))
        if f"api {worker}" in client.get("/health/requests").json():
            return client


def counts(server: Any) -> list[dict[str, int]]:
    with ExitStack() as stack:
        return [client_of(server, each, stack).get("/health/requests").json() for each in range(NUM)]


def complete(client: httpx.Client, prompt: str, max_tokens: int = 8) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def test_workers_receive_only_their_own_outputs(server: Any) -> None:
    """The texts equal those of sequential requests."""
    with ExitStack() as stack:
        clients = [client_of(server, number % NUM, stack) for number in range(len(PROMPTS))]
        alone = [complete(clients[0], prompt).json()["choices"][0]["text"] for prompt in PROMPTS]
        assert len(set(alone)) > 1
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(complete, clients, PROMPTS))
        assert [each.json()["choices"][0]["text"] for each in together] == alone
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=clients[1]) as made:
            stream = made.completions.create(
                model=made.models.list().data[0].id, prompt="One", max_tokens=5, stream=True
            )
            assert [each.choices[0].finish_reason for each in stream][-1] == "length"


def test_metrics_and_limits_cover_all_workers(server: Any) -> None:
    with ExitStack() as stack:
        clients = [client_of(server, each, stack) for each in range(NUM)]

        def generated(client: httpx.Client) -> float:
            found = re.search(r"^minisgl_generation_tokens_total\{.*\} (\S+)$", client.get("/metrics").text, re.M)
            return float(found[1]) if found else 0.0

        before = generated(clients[0])
        for client in clients:
            assert complete(client, "One", 7).status_code == 200
        assert {generated(client) for client in clients} == {before + 14}
        busy = [client_of(server, number % NUM, stack) for number in range(12)]
        body = {"prompt": "One", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        streams = [stack.enter_context(each.stream("POST", "/v1/completions", json=body)) for each in busy]
        assert {each.status_code for each in streams} == {200}
        refused = [complete(client, "One") for client in clients]
        assert [each.json()["error"]["code"] for each in refused] == ["too_many_requests"] * NUM
        streams[0].close()
        wait_for(lambda: complete(clients[1], "One").status_code == 200)
    wait_for(lambda: not any(sum(each.values()) for each in counts(server)))


def test_killed_workers_restart_and_their_requests_are_aborted(server: Any) -> None:
    with ExitStack() as stack:
        dying, other = (client_of(server, each, stack) for each in (1, 0))
        body = {"prompt": "One", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        lost = stack.enter_context(dying.stream("POST", "/v1/completions", json=body)).iter_lines()
        kept = stack.enter_context(other.stream("POST", "/v1/completions", json=body)).iter_lines()
        assert next(lost)
        assert next(kept)
        victim: psutil.Process = server.children()["api 1"]
        victim.kill()
        with pytest.raises(httpx.TransportError):
            list(lost)
        with ExitStack() as inner:
            watcher = client_of(server, 0, inner)
            wait_for(lambda: watcher.get("/health/requests").json()["running"] == 1)
        with ExitStack() as inner:  # the lost request is no longer counted
            streams = [client_of(server, 0, inner).stream("POST", "/v1/completions", json=body) for _ in range(11)]
            assert [inner.enter_context(each).status_code for each in streams] == [200] * 11
        lines = [line for line in kept if line]
        assert lines[-1] == "data: [DONE]"
        assert '"length"' in lines[-2]
        again = wait_for(lambda: server.children().get("api 1"))
        assert again.pid != victim.pid
        assert complete(client_of(server, 1, stack), PROMPTS[0]).status_code == 200
    assert re.search("'api 1' was killed by SIGKILL.* API worker 1 is restarted\\.", server.stderr())
    wait_for(lambda: not any(sum(each.values()) for each in counts(server)))


def test_a_worker_killed_during_a_drain_fails_the_launch(start: Launch) -> None:
    server = start("--api-workers", str(NUM)).wait_started()
    with ExitStack() as stack:
        body = {"prompt": "One", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        dying, other = (
            stack.enter_context(
                client_of(server, each, stack).stream("POST", "/v1/completions", json=body)
            ).iter_lines()
            for each in (1, 0)
        )
        assert next(dying)
        assert next(other)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        server.children()["api 1"].kill()
        with pytest.raises(httpx.TransportError):
            list(dying)
        assert [line for line in other if line][-1] == "data: [DONE]"
    assert server.wait_ended() == 1
    assert re.fullmatch("minisgl: The process 'api 1' was killed by SIGKILL.*\n", server.stderr())


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"api_workers": 2, "num_tokenizers": 1}, "--num-tokenizers"),
        ({"api_workers": 2, "response_store_size": 1}, "--response-store-size"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, int], flag: str) -> None:
    with pytest.raises(InvalidValueError, match=flag):
        check_api_workers(ServerOptions(**options))
    check_api_workers(ServerOptions(api_workers=2, num_tokenizers=3, response_store_size=0))
    assert ServerOptions(api_workers=2).response_store_bytes == 0
    assert ServerOptions().response_store_bytes == 64 * 2**20
