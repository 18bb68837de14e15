"""Connection limits, as docs/server.md describes them."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlparse

import httpx
import psutil


def connect(url: str) -> socket.socket:
    address = urlparse(url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def post(connection: socket.socket, body: dict[str, object]) -> None:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)


def test_a_half_closed_connection_counts_as_disconnected(server: Any, http: httpx.Client) -> None:
    body = {"prompt": "One two", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with connect(server.url) as connection:
        post(connection, body)
        assert connection.recv(8) == b"HTTP/1.1"
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    deadline = time.monotonic() + 60
    while any(http.get("/health/requests").json().values()):
        assert time.monotonic() < deadline, "the request still runs"


def test_connections_beyond_the_file_limit_are_closed(server: Any) -> None:
    api = server.children()["api"]
    before, most = api.rlimit(psutil.RLIMIT_NOFILE)
    answered = 0
    try:
        api.rlimit(psutil.RLIMIT_NOFILE, (api.num_fds() + 20, most))
        with ExitStack() as stack:
            connections = [stack.enter_context(connect(server.url)) for _ in range(60)]
            for connection in connections:
                try:
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    answer = connection.recv(15)
                except ConnectionError:
                    answer = b""
                assert answer in (b"HTTP/1.1 200 OK", b"")
                answered += bool(answer)
    finally:
        api.rlimit(psutil.RLIMIT_NOFILE, (before, most))
    assert 0 < answered < 60
    deadline = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"{server.url}/health").status_code == 200
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
