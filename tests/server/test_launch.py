"""Starting, failing and ending a server; each test launches its own with a tiny model."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.slow

Launch = Callable[..., Any]


def endless(**options: Any) -> dict[str, Any]:
    """Return a request that runs for the whole context."""
    return {"prompt": "Hi", "max_tokens": 16000, "ignore_eos": True, "temperature": 0, **options}


def events(response: httpx.Response) -> Iterator[Any]:
    """Return the chunks of a stream; ``[DONE]`` as text."""
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def assert_gone(processes: Iterable[psutil.Process]) -> None:
    """Check that the processes end. Python's resource tracker ends a moment after the launcher."""
    _, alive = psutil.wait_procs(list(processes), timeout=120)
    assert not alive


def test_the_banner_is_correct_and_sighup_drains_requests(start: Launch) -> None:
    """All processes get SIGHUP, as if a terminal closes. SIGTERM is in test_faults."""
    server = start("--served-model-name", "tiny", "--attn", "torch", "--drain-timeout", "60").wait_started()
    assert "LlamaForCausalLM" in server.banner
    attention = next(line for line in server.banner.splitlines() if line.startswith("attn"))
    assert attention.split()[1] == "torch"
    assert len(re.findall(r"\d tokens of KV|kv cache", server.banner)) == 1, "one size, without the page for padding"
    curl = shlex.split(server.banner.splitlines()[-1])
    answer = subprocess.run([*curl, "--silent", "--fail"], capture_output=True, check=True, text=True).stdout
    assert json.loads(answer)["model"] == "tiny"
    children = server.children()
    assert children.keys() >= {"engine rank 0", "tokenizer 0", "api"}
    assert "router" not in children, "one replica needs no router"
    assert psutil.Process(server.process.pid).cmdline()[0] == "minisgl: launch"
    libraries = {name: {Path(each.path).stem for each in child.memory_maps()} for name, child in children.items()}
    assert [name for name in libraries if "libtorch_cpu" in libraries[name]] == ["engine rank 0"]
    [directory] = Path(server.sockets).iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    body = endless(stream=True, max_tokens=600)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=100) as response:
        chunks = events(response)
        next(chunks)
        for name, child in children.items():
            if "python" not in name:  # the resource tracker
                child.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGHUP)
        rest = list(chunks)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["choices"][0]["finish_reason"] == "length"
    assert server.wait_ended() == 0
    assert_gone(children.values())
    assert server.stderr() == ""


def test_the_drain_has_a_timeout_and_a_second_signal_ends_it(start: Launch) -> None:
    server = start("--drain-timeout", "300").wait_started()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless(stream=True), timeout=100) as answer:
        chunks = events(answer)
        next(chunks)
        server.process.send_signal(signal.SIGINT)
        while httpx.get(f"{server.url}/ready", timeout=60).status_code == 200:
            time.sleep(0.05)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"}, timeout=60)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "shutting_down"
        next(chunks)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_ended() == 0


def test_sighup_under_nohup_stays_ignored(start: Launch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = start().wait_started()
    finally:
        signal.signal(signal.SIGHUP, before)
    for process in (psutil.Process(server.process.pid), *server.children().values()):
        process.send_signal(signal.SIGHUP)
    body = {"prompt": "Hi", "max_tokens": 50, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=100).status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_download_ends_the_launch(launch: Launch, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # it never responds
        hub.settimeout(60)
        server = launch(
            "--model", "owner/name", HF_ENDPOINT=f"http://127.0.0.1:{hub.getsockname()[1]}", HF_HUB_OFFLINE="0"
        )
        with hub.accept()[0]:  # closed, it would end the download
            server.process.send_signal(number)
            assert server.wait_ended() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--attn", "torhc"), ("--attn", "torhc", "torch")),
        (("--model", "/no/such/folder"), ("--model", "/no/such/folder")),
        (("--page-size", "0"), ("--page-size", "at least 1")),
        (("--num-tokenizers", "0"), ("--num-tokenizers", "at least 1")),
        (("--served-model-name", "tiny\n"), ("--served-model-name", "printable")),
        (("--served-model-name", "\udcff"), ("--served-model-name", "printable")),
        (("--host", "192.0.2.1"), ("--host", "192.0.2.1:0", "Cannot assign requested address.")),
        (("--host", "a..b"), ("--host", "a..b", "an address of this machine")),
        (("--tp", "2"), ("--tp=2", "one of 1, 3, 9 for this model")),
    ],
)
def test_startup_errors_are_one_line(launch: Launch, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    server = launch(*flags)
    assert server.wait_ended() == 2
    message = server.stderr().strip()
    assert message.count("\n") == 0
    assert message.startswith("minisgl: ")
    for word in words:
        assert word in message
    assert "Port 0" not in message
    assert "in the process" not in message, "no rank has started"


def test_a_failure_of_the_engine_at_startup_ends_the_launch(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "vocab_size": 10}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    server = launch("--model", str(tmp_path))
    assert server.wait_ended() == 2, "the user can correct the error"
    assert "engine rank 0" in server.stderr()


def test_a_port_in_use_is_reported_before_loading(start: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        assert server.wait_ended() == 2
    assert f"127.0.0.1:{port}" in server.stderr()


@pytest.mark.nightly
def test_several_servers_run_side_by_side(start: Launch) -> None:
    servers = [start("--served-model-name", name) for name in ("one", "two")]
    for name, server in zip(("one", "two"), servers, strict=True):
        [model] = httpx.get(f"{server.wait_started().url}/v1/models", timeout=60).json()["data"]
        assert model["id"] == name
    assert servers[0].url != servers[1].url
    body = {"prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
    assert httpx.post(f"{servers[0].url}/v1/completions", json=body, timeout=60).status_code == 200
    for server, num_tokens in zip(servers, (2, 0), strict=True):
        [line] = re.findall(r"minisgl_generation_tokens_total\{.*\} (\S+)\n", httpx.get(f"{server.url}/metrics").text)
        assert float(line) == num_tokens, "each counts its own"


def test_503_until_ready_and_no_processes_after_sigkill(start: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start("--port", str(port))
    url = f"http://127.0.0.1:{port}"
    statuses: list[int] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        while 200 not in statuses:
            time.sleep(0.02)
            try:
                answer = client.get("/ready")
            except httpx.TransportError:
                assert server.process.poll() is None
                continue
            statuses.append(answer.status_code)
            if answer.status_code == 503:
                assert client.get("/health").status_code == 200
                assert answer.json()["error"]["code"] == "not_ready"
                assert client.post("/v1/completions", json={"prompt": "Hi"}).status_code in (503, 200)
    assert 503 in statuses
    assert set(statuses) == {200, 503}
    children = server.children().values()
    server.process.kill()
    server.process.wait()
    assert_gone(children)
    assert os.listdir(server.sockets) == []


def test_disconnects_free_slots_and_a_full_queue_answers_429(start: Launch) -> None:
    server = start("--max-running-requests", "1", "--max-queued-requests", "1").wait_started()
    url = f"{server.url}/v1/completions"
    with httpx.Client(timeout=100) as client:
        with client.stream("POST", url, json=endless(stream=True)) as running:
            chunks = events(running)
            next(chunks)
            body = json.dumps(endless()).encode()
            with socket.create_connection((running.url.host, running.url.port)) as waiting:
                waiting.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
                )
                waiting.sendall(body)
                refused = client.post(url, json=endless())
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "queue_full"
                never = client.post(url, json={"prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 1})
                assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
                assert (
                    "2 prompts with n=2 are 4 outputs, and the server holds 2 at a time"
                    in never.json()["error"]["message"]
                )
        # Both clients have disconnected, with a running and a waiting request; otherwise this would take long.
        while (answer := client.post(url, json={"prompt": "Hi", "max_tokens": 1})).status_code == 429:
            time.sleep(0.02)
        assert answer.status_code == 200
    assert server.stderr() == ""


def test_compile_only_ends_without_serving(start: Launch) -> None:
    server = start("--compile-only")
    assert server.wait_ended() == 0
    assert server.process.stdout.read() == "All kernels for these options are compiled.\n"
    assert server.stderr() == ""


def test_an_interrupted_compile_only_fails(start: Launch) -> None:
    server = start("--compile-only")
    while "engine rank 0" not in server.children():
        time.sleep(0.05)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_ended() == 128 + signal.SIGTERM
    assert server.process.stdout.read() == ""


def test_the_phases_of_the_start_sum_to_its_duration(start: Launch) -> None:
    server = start("--log-level", "info").wait_started()
    log = server.stderr()
    phases = [float(seconds) for seconds in re.findall(r" launch: (?!ready).* in (\d+\.\d) s", log)]
    [total] = re.findall(r" launch: ready (\d+\.\d) s after the command", log)
    assert sum(phases) == pytest.approx(float(total), abs=0.05 * (len(phases) + 1) + 1e-6)
    assert len(phases) == 5
    for process in ("engine rank 0", "tokenizer 0"):
        assert len(re.findall(rf" {process}: started the process in \d+\.\d s", log)) == 1
