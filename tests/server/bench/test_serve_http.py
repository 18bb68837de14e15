"""The load generator's HTTP client, with scripted servers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.serve.http_client import HttpClient, HttpError, port_of
from minisgl_server.remote_server import first_model, server_url

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5;x=y\r\n\r\nd\r\n\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nsorry"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nuntil it closes"


async def fetch(client: HttpClient) -> tuple[int, bytes]:
    pieces: list[bytes] = []
    before = time.perf_counter()
    status = await client.request("POST", "/x", b"{}", lambda data, now: pieces.append(data))
    assert before <= time.perf_counter()
    return status, b"".join(pieces)


def say(data: bytes, *, step: int = 1 << 20, close: bool = False) -> Callable[[socket.socket, bytes], None]:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
        if close:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    return answer


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (CHUNKED, (200, b"abc\r\nd\r\n")),
        (SIZED, (404, b"sorry")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED, (404, b"sorry")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
async def test_whole_responses_on_one_connection(
    scripted: Any, sent: bytes, expected: tuple[int, bytes], step: int
) -> None:
    server = scripted(say(sent, step=step))
    client = HttpClient(server_url(server.url + "/base"), {"Authorization": "Bearer k"})
    assert [await fetch(client), await fetch(client)] == [expected] * 2
    assert server.num_connections == 1
    assert server.requests[0].startswith(b"POST /base/x HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in server.requests[0]
    assert server.requests[0].endswith(b"\r\n\r\n{}")
    client.close()


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (b"307 Temporary Redirect", b"", "The server answers with status 307."),
        (b"401 Unauthorized", b'{"error": {"message": "No."}}', "No. Set MINISGL_API_KEY to a key of the server."),
        (b"200 OK", b'{"data": []}', "list index out of range."),
    ],
)
def test_a_server_without_models_is_refused(scripted: Any, status: bytes, body: bytes, cause: str) -> None:
    server = scripted(say(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)))
    with pytest.raises(InvalidValueError) as refused:
        first_model(server_url(server.url), {}, "Otherwise, give --model.")
    assert str(refused.value).endswith(f"{server.url}/v1/models: {cause} Otherwise, give --model.")


async def test_a_body_may_end_with_the_connection(scripted: Any) -> None:
    server = scripted(say(ENDLESS, close=True))
    client = HttpClient(server_url(server.url), {})
    assert [await fetch(client), await fetch(client)] == [(200, b"until it closes")] * 2
    assert server.num_connections == 2


async def test_an_idle_connection_that_the_server_closed_is_replaced(scripted: Any) -> None:
    server = scripted(say(SIZED, close=True))
    client = HttpClient(server_url(server.url), {})
    for delay_s in (0.1, 0, 0):  # before or after the client notices
        assert await fetch(client) == (404, b"sorry")
        await asyncio.sleep(delay_s)
    assert server.num_connections == 3


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (CHUNKED[:-5], "closed before the end of the response"),
        (SIZED[:-1], "closed before the end of the response"),
        (b"", "closed before the end of the response"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP/1.1"),
    ],
)
async def test_invalid_responses_fail_the_request(scripted: Any, sent: bytes, words: str) -> None:
    server = scripted(say(sent, close=True))
    with pytest.raises(HttpError, match=words):
        await fetch(HttpClient(server_url(server.url), {}))
    assert len(server.requests) == 1, "a request that may have been processed is not sent again"


async def test_a_missing_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(HttpError, match="cannot connect"):
        await fetch(HttpClient(server_url(f"http://127.0.0.1:{port}"), {}))


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("http://h/v1/", "h", 80, "/"),
        ("https://h/a/", "h", 443, "/a"),
        ("http://[::1]:8000/a/v1", "::1", 8000, "/a"),
    ],
)
def test_valid_server_urls(text: str, host: str, port: int, path: str) -> None:
    url = server_url(text)
    assert (url.host, port_of(url), url.path) == (host, port, path)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:x"])
def test_invalid_server_urls(url: str) -> None:
    with pytest.raises(InvalidValueError, match="the URL of a server"):
        server_url(url)
