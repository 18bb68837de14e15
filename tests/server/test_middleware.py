"""API keys, limits of bodies and concurrency, CORS, and their errors and logs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import uvicorn
from fastapi import FastAPI, Request

from minisgl_core.errors import InvalidValueError
from minisgl_server.api import errors
from minisgl_server.api.http.middleware import RequestLimitMiddleware
from minisgl_server.launch.api_keys import api_key_digests
from minisgl_server.options import ServerOptions

KEYS = ("first-key-4711", "second-key-4712", "third-key-4713")
MAX_BODY = 20_000


@pytest.fixture(scope="module")
def guarded(launch_shared: Callable[..., Any], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Server with all of these options."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"\n{KEYS[1]}\n")
    flags = ["--model", str(tiny_checkpoint), "--num-pages", "1100", "--api-key-file", str(file)]
    flags += ["--api-key", KEYS[0], "--api-key", KEYS[2]]
    flags += ["--cors-origin", "https://a.example", "--cors-origin", "https://b.example"]
    flags += ["--max-body-size", str(MAX_BODY), "--max-concurrent-requests", "2", "--plugin-routes"]
    flags += ["--log-level", "debug", "--log-format", "json"]
    return launch_shared(*flags, MINISGL_API_KEY=KEYS[0]).wait_started()


@pytest.fixture(scope="module")
def authenticated(guarded: Any) -> Iterator[httpx.Client]:
    """Client with an API key."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=guarded.url, timeout=100, headers=headers) as made:
        yield made


def lines(server: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.stderr().splitlines()]


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_accepted(guarded: Any, key: str) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, timeout=100) as client:
        assert len(client.models.list().data) == 1


def test_the_printed_request_reads_its_key_from_the_environment(guarded: Any) -> None:
    command = [*guarded.banner.splitlines()[-1:], "--silent --fail"]
    answer = subprocess.run(
        " ".join(command), shell=True, env={**os.environ, "MINISGL_API_KEY": KEYS[1]}, capture_output=True, check=True
    )
    assert json.loads(answer.stdout)["choices"]


def test_clients_send_the_first_of_several_keys(guarded: Any) -> None:
    several = {**os.environ, "MINISGL_API_KEY": f"{KEYS[2]} another"}
    curl = subprocess.run(
        f"{guarded.banner.splitlines()[-1]} --silent --fail", shell=True, env=several, capture_output=True, check=True
    )
    assert json.loads(curl.stdout)["choices"]
    shell = ["minisgl", "shell", "--url", guarded.url, "--max-tokens", "3"]
    subprocess.run(shell, input="Hi\n", text=True, env=several, capture_output=True, check=True, timeout=100)
    bench = [
        "minisgl",
        "bench",
        "serve",
        "--url",
        guarded.url,
        "--num-requests",
        "1",
        "--input-len",
        "5",
        "--output-len",
        "2",
    ]
    subprocess.run(bench, env=several, capture_output=True, check=True, timeout=100)


@pytest.mark.parametrize("trickle", [b"", b"x", b"x" * 400])
def test_a_body_timeout_frees_its_slot(trickle: bytes) -> None:
    """A body at 400 bytes per 50 ms would take more than an hour for 32 MiB."""
    app = FastAPI()
    errors.add_error_handlers(app)

    @app.post("/")
    async def read(request: Request) -> int:
        return len(await request.body())

    config = uvicorn.Config(RequestLimitMiddleware(app, lambda: 10**6, 1, body_timeout_s=0.3), port=0, log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        with socket.create_connection(address) as stalled:
            stalled.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\nhalf")
            stalled.settimeout(20)
            latest_s = time.monotonic() + 10
            with suppress(OSError):
                while trickle and time.monotonic() < latest_s and not select.select([stalled], [], [], 0.05)[0]:
                    stalled.sendall(trickle)
            assert time.monotonic() < latest_s
            answer = b""
            with suppress(ConnectionResetError):  # the server closes the connection with unread bytes
                while part := stalled.recv(4096):
                    answer += part
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer
        with httpx.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=20) as client:
            assert client.post("/", content=b"whole").json() == 5
    finally:
        server.should_exit = True
        thread.join()


async def test_refused_requests_do_not_count_as_concurrent() -> None:
    """This holds even if the client does not read the refusal."""
    release = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()

    async def unread(message: Any) -> None:
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    counts = memoryview(bytearray(4)).cast("i")
    limited = RequestLimitMiddleware(app, lambda: 100, 1, request_counts=counts)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    served, *refused = [asyncio.create_task(limited(scope, receive, unread)) for _ in range(3)]
    await asyncio.sleep(0)
    release.set()
    await served
    assert counts[0] == 0
    assert not any(task.done() for task in refused)
    await asyncio.wait_for(limited(scope, receive, unread), 10)
    for task in refused:
        task.cancel()


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", KEYS[0], "Bearer \xff"])
def test_without_a_key_only_public_paths_are_served(guarded: Any, authorization: str) -> None:
    headers = {"Authorization": authorization.encode("latin-1")}
    with httpx.Client(base_url=guarded.url, timeout=100) as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/no/such", "/health/requests", "/docs"):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
        assert client.post("/generate", headers=headers, json={}).status_code == 401
        assert client.get("/health", headers=headers).status_code == 200
        assert client.get("/ready", headers=headers).status_code == 200


def test_the_client_raises_its_authentication_error(guarded: Any) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_large_bodies_are_refused_before_they_are_read(guarded: Any, authenticated: httpx.Client) -> None:
    fits = {"prompt": "x", "max_tokens": 1, "stop": ["y" * (MAX_BODY - 100)]}
    assert authenticated.post("/v1/completions", json=fits).status_code == 200
    port = int(guarded.url.rpartition(":")[2])
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    for request in (
        f"{head}Content-Length: {10**12}\r\n\r\n".encode(),
        f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * (MAX_BODY // 4096 + 1),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(request)
            answer = b""
            while part := connection.recv(4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"
    assert authenticated.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_clients_that_send_before_they_read_get_413(guarded: Any) -> None:
    """Closing the connection earlier would reset it before the client reads the response."""

    async def send(content: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=guarded.url, timeout=100) as client:
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            return await client.post("/v1/completions", content=content, headers=headers)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 2**17

    for content in (b" " * (25 * 2**20), parts()):
        answer = asyncio.run(send(content))
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_too_many_concurrent_requests_get_429(guarded: Any, authenticated: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 16000, "ignore_eos": True, "stream": True}
    native = {"text": "x", "max_tokens": 16000, "ignore_eos": True, "stream": True}
    with (
        authenticated.stream("POST", "/v1/completions", json=body) as first,
        authenticated.stream("POST", "/generate", json=native) as second,
    ):
        chunks = first.iter_lines(), second.iter_lines()  # kept, as a dropped iterator disconnects
        for each in chunks:
            next(each)
        refused = authenticated.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert authenticated.get("/v1/models").status_code == 200, "requests without the engine do not count"
    while (answer := authenticated.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 429:
        time.sleep(0.02)
    assert answer.status_code == 200, "requests of disconnected clients do not count"


def test_only_given_cors_origins_are_allowed(guarded: Any, authenticated: httpx.Client) -> None:
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = httpx.options(f"{guarded.url}/v1/completions", headers={"Origin": "https://b.example", **wish})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://b.example"
    refused = httpx.options(f"{guarded.url}/v1/completions", headers={"Origin": "https://c.example", **wish})
    assert "access-control-allow-origin" not in refused.headers
    answer = authenticated.get("/v1/models", headers={"Origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert exposed == ["X-Request-Id", "Request-Id", "Retry-After"], "clients of both APIs may run in a page"
    closed = httpx.get(f"{guarded.url}/v1/models", headers={"Origin": "https://a.example"})
    assert closed.status_code == 401
    assert closed.headers["access-control-allow-origin"] == "https://a.example", (
        "pages need the CORS header to read the error"
    )


def test_no_origin_is_allowed_by_default(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert http.options("/v1/models", headers={"Origin": "https://a.example"}).status_code == 405


def test_responses_have_request_ids(guarded: Any, authenticated: httpx.Client) -> None:
    given = authenticated.post(
        "/generate", json={"text": "x", "max_tokens": 2}, headers={"X-Request-Id": "my:request/7"}
    )
    assert given.headers["x-request-id"] == "my:request/7"
    assert "my:request/7" in given.json()["meta_info"]["id"]
    for bad in ("a b", "a" * 129, "é".encode()):
        fresh = authenticated.get("/v1/models", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{16}", fresh)
    for path, status in (("/no/such", 404), ("/v1/completions", 405)):
        answer = authenticated.get(path, headers={"X-Request-Id": f"id-{status}"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, f"id-{status}")
    ours = [line for line in lines(guarded) if "my:request/7" in line.get("request_id", "")]
    assert {line["process"] for line in ours} == {"api", "tokenizer 0", "engine rank 0"}
    [access] = [line for line in ours if line["logger"] == "minisgl_server.api.http.request_log"]
    assert (access["status"], access["prompt_tokens"], access["output_tokens"]) == (200, 1, 2)
    assert access["duration_s"] > 0


def test_the_log_names_requests_whose_client_left(guarded: Any, authenticated: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 16000, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": "leaves"}
    with authenticated.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        chunks = response.iter_lines()  # kept, as a dropped iterator disconnects
        next(chunks)
    while not (left := [line for line in lines(guarded) if line.get("client_gone") and line["request_id"] == "leaves"]):
        time.sleep(0.02)
    assert [(line["path"], line["status"]) for line in left] == [("/v1/completions", 200)]


def test_plugin_routes_need_the_flag_and_the_api_key(
    guarded: Any, authenticated: httpx.Client, http: httpx.Client
) -> None:
    assert authenticated.get("/example").json() == {"greeting": "hello from minisgl-example"}
    assert httpx.get(f"{guarded.url}/example").status_code == 401
    assert http.get("/example").status_code == 404


def test_errors_contain_no_keys(guarded: Any, authenticated: httpx.Client) -> None:
    authenticated.get(f"/v1/models?key={KEYS[0]}")
    exposed = (
        guarded.banner + guarded.stderr() + authenticated.get("/openapi.json").text + authenticated.get("/metrics").text
    )
    processes = [psutil.Process(guarded.process.pid), *guarded.children().values()]
    assert len(processes) >= 4
    exposed += " ".join(word for process in processes for word in process.cmdline())
    assert not any("MINISGL_API_KEY" in each.environ() for each in processes[1:])
    assert not [key for key in KEYS if key in exposed]
    assert "/v1/models" in exposed


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ({"api_key": ("se cret",)}, None, ["--api-key", "printable ASCII"]),
        ({"api_key": ("",)}, None, ["--api-key"]),
        ({"api_key_file": "/no/such"}, None, ["--api-key-file", "/no/such", "No such file"]),
        ({"api_key_file": "/dev/null"}, None, ["--api-key-file", "at least one key"]),
        ({"api_key_file": "keys.txt"}, None, ["line 3 of --api-key-file", "printable ASCII"]),
        ({}, " ", ["MINISGL_API_KEY"]),
    ],
)
def test_a_key_source_without_valid_keys_ends_the_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], environ: str | None, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys.txt").write_text("good\n\nse cret\n")
    monkeypatch.delenv("MINISGL_API_KEY", raising=False)
    if environ is not None:
        monkeypatch.setenv("MINISGL_API_KEY", environ)
    with pytest.raises(InvalidValueError) as caught:
        api_key_digests(ServerOptions(**options))
    for word in words:
        assert word in str(caught.value)
    assert "se cret" not in str(caught.value)


def test_an_empty_key_in_the_environment_ends_the_launch(launch: Callable[..., Any]) -> None:
    server = launch(MINISGL_API_KEY="")
    assert server.wait_ended() == 2
    assert "MINISGL_API_KEY" in server.stderr()
