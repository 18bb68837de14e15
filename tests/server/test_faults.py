"""Faults and their effects, in the order of docs/server.md."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import psutil
import pytest
import tiny_folder

pytestmark = pytest.mark.slow

Launch = Callable[..., Any]


def endless(**options: Any) -> dict[str, Any]:
    """Return a streamed request that runs for the whole context."""
    return {"prompt": "Hi", "max_tokens": 16000, "ignore_eos": True, "temperature": 0, "stream": True, **options}


def events(response: httpx.Response) -> Iterator[Any]:
    """Return the chunks of a stream; ``[DONE]`` as text."""
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@pytest.mark.parametrize(
    "victim", ["engine rank 0", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tokenizer 0", "api"))]
)
def test_a_killed_process_ends_the_launch_with_the_reason(start: Launch, victim: str) -> None:
    server = start().wait_started()
    children = server.children()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless(), timeout=100) as answer:
        chunks = events(answer)
        next(chunks)
        children[victim].kill()
        if victim == "api":
            with pytest.raises(httpx.RemoteProtocolError):
                list(chunks)
        else:
            *_, last = chunks
            assert last["error"]["code"] == "engine_stopped"
    assert server.wait_ended() == 1
    assert f"'{victim}' was killed by SIGKILL" in server.stderr()
    _, alive = psutil.wait_procs(list(children.values()), timeout=120)
    assert not alive


@pytest.mark.parametrize("parallel", ["--tp", pytest.param("--pp", marks=pytest.mark.nightly)])
def test_a_killed_rank_ends_the_launch(launch: Launch, parallel: str) -> None:
    flags = {"--model": tiny_folder.llama(), parallel: 2, "--dtype": "float32", "--ops": "torch"}
    flags["--max-seq-len-override"] = 256
    server = launch(*(str(part) for flag in flags.items() for part in flag)).wait_started()
    children = server.children()
    assert ("layers 0 on rank 0, 1 on rank 1" in server.banner) == (parallel == "--pp")
    assert httpx.post(f"{server.url}/generate", json={"text": "w5", "max_tokens": 2}, timeout=100).status_code == 200
    children["engine rank 1"].kill()
    assert server.wait_ended() == 1
    assert "'engine rank 1' was killed by SIGKILL" in server.stderr()
    _, alive = psutil.wait_procs(list(children.values()), timeout=120)
    assert not alive


def test_sigterm_under_load_completes_all_requests(start: Launch) -> None:
    """All processes get the signal, as from systemd."""
    server = start("--drain-timeout", "inf").wait_started()

    def ask(number: int) -> list[Any]:
        body = endless(prompt=f"{number} and", max_tokens=80, echo=True)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=200) as answer:
            if answer.status_code != 200:
                return [answer.status_code, json.loads(answer.read())["error"]["code"]]
            chunks = events(answer)
            first = next(chunks)
            started.release()
            return [first, *chunks]

    started = Semaphore(0)
    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(ask, number) for number in range(24)]
        for _ in range(12):
            started.acquire()
        for child in server.children().values():
            child.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        ended = [answer.result() for answer in answers]
    assert server.wait_ended() == 0
    refused = [answer for answer in ended if answer[0] == 503]
    assert all(answer == [503, "shutting_down"] for answer in refused)
    for number, answer in enumerate(ended):
        if answer not in refused:
            assert answer[0]["choices"][0]["text"].startswith(f"{number} and"), "each request gets its own output"
            assert answer[-2]["choices"][0]["finish_reason"] == "length"
            assert answer[-1] == "[DONE]"
    assert len(ended) - len(refused) >= 12
    assert server.stderr() == ""


def test_requests_beyond_the_drain_timeout_fail(start: Launch) -> None:
    server = start("--drain-timeout", "0.5").wait_started()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless(), timeout=100) as answer:
        chunks = events(answer)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        *_, last = chunks
    assert last["error"]["code"] == "shutting_down"
    assert server.wait_ended() == 0
    assert server.stderr() == ""


@pytest.mark.nightly
def test_a_full_disk_loses_only_logs_and_output_files(tiny_checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("minisgl")), "launch", "--model", str(tiny_checkpoint)]
    command += ["--num-pages", "1100", "--port", str(port), "--log-level", "debug"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100) as client:
            while True:
                assert process.poll() is None
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
            for _ in range(20):
                assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0
    finally:
        process.kill()
        process.wait()


def test_slow_readers_delay_no_request_and_lose_no_text(start: Launch) -> None:
    server = start().wait_started()
    # Each event has the whole text so far. An event per token would exceed the socket buffers.
    body = json.dumps({"text": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    with socket.socket() as slow, httpx.Client(base_url=server.url, timeout=100) as others:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(100)
        slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        slow.sendall(head + body)
        answer = slow.recv(100)
        assert answer.startswith(b"HTTP/1.1 200")
        num_served = 0
        while any(others.get("/health/requests").json().values()):
            assert others.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
            num_served += 1
            time.sleep(0.05)
        assert num_served > 0, "other requests were served during the slow one"
        parts = [answer]
        while part := slow.recv(2**16):
            parts.append(part)
    whole = b"".join(parts)
    events = [line for line in whole.splitlines() if line.startswith(b"data: {")]
    assert len(events) < 1500, "outputs that arrive while the buffers are full are sent together"
    assert json.loads(events[-1].removeprefix(b"data: "))["meta_info"]["completion_tokens"] == 1500
    assert b"data: [DONE]" in whole[-30:]
    assert server.stderr() == ""
