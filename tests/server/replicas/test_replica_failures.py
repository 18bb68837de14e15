"""Two replicas of two pipeline stages: processes are killed before readiness, while they serve, and during the drain."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.slow
Launch = Callable[..., Any]
FLAGS = ("--dtype", "float32", "--num-pages", "1100", "--attn", "torch", "--replicas", "2", "--pp", "2")
ROUTING = ("--router", "least-loaded", "--drain-timeout", "200")


def wait_for(condition: Callable[[], Any], limit_s: float = 100) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def child(server: Any, name: str) -> psutil.Process | None:
    with suppress(psutil.Error, IndexError):  # a child that has ended or has no title yet
        return server.children().get(name)  # type: ignore[no-any-return]
    return None


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the checkpoint, as a test hides one of its files."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("replicas") / "model"))


@pytest.fixture(scope="module")
def server(launch_shared: Launch, checkpoint: Path) -> Any:
    """Server of which a rank is killed before readiness. The rank is restarted, as it is later."""
    server = launch_shared("--model", str(checkpoint), *FLAGS, *ROUTING, OMP_NUM_THREADS="1")
    wait_for(lambda: child(server, "replica 1 rank 1")).kill()
    return server.wait_started()


def state(server: Any) -> httpx.Response:
    return httpx.get(f"{server.url}/engine/state", timeout=60)


def wait_all_ready(server: Any) -> None:
    wait_for(lambda: all(each["is_ready"] for each in state(server).json().get("replicas", [{"is_ready": False}])))


class Stream:
    """A streamed completion that reports its first event."""

    def __init__(self, server: Any, number: int, max_tokens: int) -> None:
        self._url, self.started, self.events = f"{server.url}/v1/completions", Semaphore(0), []
        body = {"prompt": f"{number} bottles", "max_tokens": max_tokens, "temperature": 0}
        self._body = body | {"ignore_eos": True, "stream": True}

    def lines(self) -> Iterator[str]:
        with httpx.stream("POST", self._url, json=self._body, timeout=200) as answer:
            for line in filter(None, answer.iter_lines()):
                yield line.removeprefix("data: ")

    def run(self) -> list[Any]:
        for data in self.lines():
            self.events.append(data if data == "[DONE]" else json.loads(data))
            self.started.release()
        self.started.release()
        return self.events


def run_streams(server: Any, num: int, max_tokens: int, then: Callable[[], None]) -> list[list[Any]]:
    """Return the events of streams; `then` is called once all have sent events."""
    streams = [Stream(server, number, max_tokens) for number in range(num)]
    with ThreadPoolExecutor(num) as pool:
        ended = [pool.submit(each.run) for each in streams]
        for each in streams:
            each.started.acquire()
        then()
        return [each.result() for each in ended]


def num_errors(events: list[Any]) -> int:
    return sum("error" in event for event in events)


def test_a_rank_that_dies_before_readiness_is_restarted(server: Any) -> None:
    assert "'replica 1 rank 1' was killed by SIGKILL" in server.stderr()
    assert "Replica 1 is restarted." in server.stderr()
    assert all(num_errors(events) == 0 for events in run_streams(server, 2, 3, lambda: None))


@pytest.mark.nightly
def test_a_killed_rank_gives_one_error_per_lost_stream(server: Any) -> None:
    victim = child(server, "replica 0 rank 1")
    assert victim is not None
    ended = run_streams(server, 6, 1000, victim.kill)
    assert sorted(map(num_errors, ended)) == [0, 0, 0, 1, 1, 1]
    for events in ended:
        if num_errors(events):
            assert events[-1]["error"]["code"] == "replica_lost"
            assert len(events) > 1
        else:
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"


def complete(server: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "One", "max_tokens": 2}, timeout=200)


@pytest.mark.nightly
def test_requests_are_refused_while_all_replicas_fail_repeatedly(server: Any, checkpoint: Path) -> None:
    """A waiting request is refused, too. Once a replica is ready, requests are served again."""
    wait_all_ready(server)
    config = checkpoint / "config.json"

    def get(path: str) -> httpx.Response:
        return httpx.get(f"{server.url}{path}", timeout=60)

    hidden = config.rename(checkpoint / "hidden.json")  # replicas cannot restart
    for replica in range(2):
        wait_for(lambda replica=replica: child(server, f"replica {replica} rank 0")).kill()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server)
        wait_for(lambda: get("/ready").status_code == 503)
        refused = [get("/ready"), get("/health"), state(server), complete(server), waiting.result()]
    hidden.rename(config)
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert int(answer.headers["retry-after"]) >= 1
    assert re.search(r"Replica \d is restarted in \d+ s, since it has failed \d+ times in a row", server.stderr())
    wait_for(lambda: get("/ready").status_code == 200)
    assert get("/health").status_code == complete(server).status_code == 200


@pytest.mark.nightly
def test_a_drain_restarts_no_replica_and_fails(server: Any) -> None:
    """The killed replica loses its streams; the others finish, and the launch fails."""
    wait_all_ready(server)
    before = server.stderr().count("is restarted")

    def drain_and_kill() -> None:
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/ready", timeout=60).status_code == 503)
        victim = child(server, "replica 1 rank 0")
        assert victim is not None
        victim.kill()

    ended = run_streams(server, 4, 1000, drain_and_kill)
    assert sorted(map(num_errors, ended)) == [0, 0, 1, 1]
    assert server.wait_ended() == 1
    assert server.stderr().count("is restarted") == before
    assert re.search("^minisgl: The process 'replica 1 rank 0' was killed by SIGKILL", server.stderr(), re.MULTILINE)
    assert "Replica 1 stays down, because the server is stopping." in server.stderr()


@pytest.mark.nightly
def test_a_permanent_error_ends_the_launch(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "vocab_size": 10}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    server = launch("--model", str(tmp_path), "--replicas", "2")
    assert server.wait_ended() == 2, "the user can correct the error"
    assert "NoSuchModel" in server.stderr()
    assert "restarted" not in server.stderr()
