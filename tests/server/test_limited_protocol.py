"""Limits on connections and headers, over sockets on a server with small limits."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from minisgl_server.api import errors
from minisgl_server.api.http.connection_limits import ConnectionLimits
from minisgl_server.api.http.limited_protocol import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    limited_protocol_class,
)

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
Address = tuple[str, int]


def application() -> FastAPI:
    app = FastAPI()
    errors.add_error_handlers(app)
    app.state.release, app.state.stream_ended = threading.Event(), threading.Event()

    @app.get("/")
    async def get(request: Request) -> dict[str, int]:
        return {"headers": len(request.headers)}

    @app.post("/")
    async def post(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body()), "headers": len(request.headers)}

    @app.get("/slow")
    def slow() -> str:
        app.state.release.wait(60)
        return "done"

    @app.get("/stream")
    async def stream(request: Request) -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "begun"
            try:
                while not await request.is_disconnected() and not app.state.release.is_set():
                    await asyncio.sleep(0.05)
            finally:
                app.state.stream_ended.set()

        return StreamingResponse(parts())

    return app


@contextmanager
def serving(
    app: FastAPI | None = None, keep_alive_s: int = 60, **bounds: Any
) -> Iterator[tuple[Address, ConnectionLimits]]:
    connections = ConnectionLimits(**{"max_total": 100, "max_per_address": 100, **bounds})
    config = uvicorn.Config(
        app or application(),
        port=0,
        log_config=None,
        http=limited_protocol_class(connections),
        ws="none",
        timeout_keep_alive=keep_alive_s,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname(), connections
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with serving() as (address, _):
        yield address


def read(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    connection.settimeout(20)
    return b"".join(iter(lambda: connection.recv(65536), b""))


def ask(address: Address, *parts: bytes) -> bytes:
    with socket.create_connection(address) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)
        return read(connection)


def refusal(answer: bytes) -> tuple[int, str]:
    """Return status and code of a complete response that ends the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head, answer
    assert f"\r\nContent-Length: {len(body)}\r\n".encode() in head, answer
    error = json.loads(body)["error"]
    assert error["message"]
    return int(head.split()[1]), error["code"]


def last(request: bytes) -> bytes:
    return request + b"Connection: close\r\n\r\n"


def test_the_maximum_number_of_headers_is_served(address: Address) -> None:
    headers = b"".join(b"X-%d: y\r\n" % number for number in range(MAX_HEADERS - 2))
    answer = ask(address, last(GET + headers))
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert answer.endswith(b'{"headers":%d}' % MAX_HEADERS)
    large = ask(address, last(GET + b"X: " + b"y" * (MAX_HEADER_BYTES - 200) + b"\r\n"))
    assert large.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "request_head",
    [
        GET + b"X: y\r\n" * MAX_HEADERS + b"\r\n",
        GET + b"X: " + b"y" * MAX_HEADER_BYTES + b"\r\n\r\n",
        GET + b"y" * MAX_HEADER_BYTES + b": x\r\n\r\n",
        b"GET /?" + b"y" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        GET + b"".join(b"X-%d: %s\r\n" % (number, b"y" * 2000) for number in range(40)) + b"\r\n",
        GET + b"X: " + b"y" * MAX_HEADER_BYTES,
        b"GET /" + b"y" * MAX_HEADER_BYTES,
    ],
    ids=["many", "value", "name", "line", "sum", "unfinished-value", "unfinished-line"],
)
def test_too_many_or_too_large_headers_get_431(address: Address, request_head: bytes) -> None:
    assert refusal(ask(address, request_head)) == (431, "headers_too_large")
    assert refusal(ask(address, request_head[:5000], request_head[5000:])) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "rest",
    [b"1;" + b"x" * MAX_HEADER_BYTES, b"0\r\nX: " + b"y" * MAX_HEADER_BYTES, b"0\r\n" + b"X: y\r\n" * MAX_HEADERS],
    ids=["extension", "trailer", "trailers"],
)
def test_chunk_extensions_and_trailers_are_bounded(address: Address, rest: bytes) -> None:
    assert refusal(ask(address, CHUNKED + b"2\r\nab\r\n", rest)) == (431, "headers_too_large")


def test_short_chunk_extensions_and_trailers_are_dropped(address: Address) -> None:
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = ask(address, head + b"2;a=b\r\nab\r\n", b"0\r\nX: y\r\n\r\n")
    assert answer.endswith(b'{"bytes":2,"headers":3}'), answer


def test_bodies_do_not_count_as_headers(address: Address) -> None:
    body = b"b" * 200_000
    first = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    answer = ask(address, first + GET[:10], last(GET[10:]))
    assert answer.count(b"HTTP/1.1 200 ") == 2, answer


def test_malformed_http_gets_400(address: Address) -> None:
    for data in (b"\x16\x03\x01\x02\x00\r\n", b"BREW / HTTP/1.1\r\n\r\n", CHUNKED + b"zz\r\n"):
        assert refusal(ask(address, data)) == (400, "malformed_request")


def test_a_started_response_is_not_followed_by_an_error() -> None:
    with serving() as (address, _), socket.create_connection(address) as connection:
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        while b"begun" not in connection.recv(65536):
            pass
        connection.sendall(b"\x00\x00")
        assert read_or_reset(connection) == b""


def read_or_reset(connection: socket.socket) -> bytes:
    try:
        return read(connection)
    except ConnectionResetError:
        return b""


def test_pipelined_requests_are_answered_in_order(address: Address) -> None:
    requests = b"".join(GET + b"X: y\r\n" * number + b"\r\n" for number in range(MAX_PIPELINED - 1))
    answer = ask(address, requests + last(GET))
    counts = [int(part.split(b"}")[0]) for part in answer.split(b'{"headers":')[1:]]
    assert counts == [*range(1, MAX_PIPELINED), 2]


def test_too_many_pipelined_requests_end_the_connection(address: Address) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall((GET + b"\r\n") * 1000)
        assert read_or_reset(connection).count(b"HTTP/1.1") <= MAX_PIPELINED


def test_a_closed_connection_ends_its_running_request() -> None:
    app = application()
    with serving(app) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        while b"begun" not in connection.recv(65536):
            pass
        connection.sendall(GET + b"\r\n\x00\x00")
        assert read_or_reset(connection) == b""
        has_ended = app.state.stream_ended.wait(20)
        app.state.release.set()  # otherwise the running stream would keep the server from ending
        assert has_ended


@pytest.mark.parametrize("name", [b"websocket", b"h2c"])
def test_an_upgrade_request_is_ignored(address: Address, name: bytes) -> None:
    upgrade = GET + b"Connection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Key: eA==\r\n\r\n" % name
    answer = ask(address, upgrade + upgrade, last(GET))
    assert answer.count(b"HTTP/1.1 200 ") == 3, answer


@pytest.mark.parametrize("sent", [b"GET /", GET + b"X"], ids=["line", "headers"])
def test_incomplete_headers_get_408(sent: bytes) -> None:
    with serving(headers_timeout_s=0.5) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(sent)
        for _ in range(20):  # single bytes do not extend the timeout
            time.sleep(0.05)
            try:
                connection.sendall(b"a")
            except OSError:
                break
        assert refusal(read(connection)) == (408, "headers_timeout")


def test_a_later_request_without_headers_gets_408() -> None:
    with serving(headers_timeout_s=0.5) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(GET + b"\r\n")
        time.sleep(0.2)
        connection.sendall(GET)
        answers = read(connection)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert refusal(answers[answers.index(b"HTTP/1.1 408") :]) == (408, "headers_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"], ids=["nothing", "blank-lines"])
def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    with serving(headers_timeout_s=0.5) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert b"HTTP/1.1 200" not in read(connection)


def test_a_slow_response_does_not_time_out_its_request() -> None:
    app = application()
    with serving(app, headers_timeout_s=0.3) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
        time.sleep(1)
        app.state.release.set()
        time.sleep(0.1)
        connection.sendall(b"Connection: close\r\n\r\n")
        assert read(connection).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("reads", [False, True])
def test_clients_that_read_nothing_are_disconnected(reads: bool) -> None:
    app = application()
    num_bytes, ended = 32 * 2**20, threading.Event()

    @app.get("/large")
    async def large() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            try:
                for _ in range(num_bytes // 2**18):
                    yield bytes(2**18)
            finally:
                ended.set()

        return StreamingResponse(parts())

    with serving(app, write_timeout_s=0.5) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if not reads:
            assert ended.wait(10)
            return
        num_read, begun = 0, time.monotonic()
        while part := connection.recv(2**18):
            num_read += len(part)
            if time.monotonic() - begun < 2:
                time.sleep(0.05)
        assert num_read > num_bytes


def test_unread_responses_are_bounded_over_all_connections() -> None:
    app, num_bytes = application(), 32 * 2**20

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(num_bytes))

    def get_large(address: Address) -> socket.socket:
        connection = stack.enter_context(socket.create_connection(address))
        connection.sendall(last(b"GET /large HTTP/1.1\r\nHost: x\r\n"))
        assert connection.recv(1, socket.MSG_PEEK)  # the response has started
        return connection

    with serving(app, max_unread_bytes=2 * num_bytes) as (address, _), ExitStack() as stack:
        connections = [get_large(address) for _ in range(3)]
        received = bytearray()
        connections[0].settimeout(20)
        with suppress(ConnectionResetError):
            while part := connections[0].recv(2**16):
                received += part
        assert len(received) < num_bytes, "the connection that has waited longest is closed"
        for connection in connections[1:]:
            assert len(read(connection)) > num_bytes
        assert len(read(get_large(address))) > num_bytes, "the others have been read"


def test_a_pipelined_request_may_take_long() -> None:
    app = application()
    with serving(app, keep_alive_s=1) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nGET /sl")
        time.sleep(0.1)
        app.state.release.set()
        connection.settimeout(20)
        while b"done" not in connection.recv(65536):
            pass
        app.state.release.clear()
        connection.sendall(b"ow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        time.sleep(1.5)
        app.state.release.set()
        assert b"done" in read(connection)


def test_blank_lines_keep_no_idle_connection_open() -> None:
    with serving(keep_alive_s=1) as (address, _), socket.create_connection(address) as connection:
        connection.sendall(GET + b"\r\n")
        connection.settimeout(0.1)
        begun = time.monotonic()
        while read_after_blank_line(connection) != b"":
            assert time.monotonic() < begun + 10


def read_after_blank_line(connection: socket.socket) -> bytes | None:
    """Read a part. Return None if nothing arrives, and nothing once the connection is closed."""
    try:
        connection.sendall(b"\r\n")
        return connection.recv(65536)
    except TimeoutError:
        return None
    except OSError:
        return b""


def test_unfinished_headers_are_bounded_over_all_connections() -> None:
    with serving(max_unfinished_bytes=100_000) as (address, bounds), ExitStack() as stack:
        answers = []
        for _ in range(5):
            connection = stack.enter_context(socket.create_connection(address))
            connection.sendall(GET + b"X: " + b"y" * 40_000)
            time.sleep(0.1)
            connection.setblocking(False)
            try:
                answers.append(connection.recv(65536))
            except BlockingIOError:
                answers.append(b"")
        assert [answer[9:12] for answer in answers] == [b"", b"", b"503", b"503", b"503"]
        assert bounds.num_unfinished_bytes > 80_000
        assert ask(address, last(GET)).startswith(b"HTTP/1.1 200 "), "complete requests are still served"
        stack.close()
        deadline = time.monotonic() + 10
        while bounds.num_unfinished_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_connections_beyond_the_total_get_503() -> None:
    with serving(max_total=2) as (address, _):
        with socket.create_connection(address), socket.create_connection(address):
            time.sleep(0.1)
            answer = ask(address)
            assert refusal(answer) == (503, "too_many_connections")
            assert b"\r\nRetry-After: 1" in answer
        time.sleep(0.1)
        assert ask(address, last(GET)).startswith(b"HTTP/1.1 200 ")


def test_connections_from_this_host_have_no_address_limit() -> None:
    with serving(max_per_address=1) as (address, _), socket.create_connection(address):
        assert ask(address, last(GET)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("host", "neighbour", "counted"),
    [
        ("203.0.113.7", "203.0.113.8", "203.0.113.7"),
        ("::ffff:203.0.113.7", "::ffff:203.0.113.8", "203.0.113.7"),
        ("2001:db8:1:2::9", "2001:db8:1:3::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "2001:db8::1", "fe80::/64"),
    ],
)
def test_connections_beyond_those_of_an_address_get_429(host: str, neighbour: str, counted: str) -> None:
    bounds = ConnectionLimits(max_total=100, max_per_address=2)
    assert bounds.add(host, 1) is None
    assert bounds.add(host, 2) is None
    error = bounds.add(host, 3)
    assert error is not None
    assert error.status == 429
    assert f"from {counted} " in error.message
    assert "--max-connections-per-address" in error.message
    assert bounds.add(neighbour, 4) is None
    for _ in range(3):
        bounds.remove(host)
    assert bounds.add(host, 2) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", ""])
def test_addresses_of_this_host_have_no_limit(host: str) -> None:
    bounds = ConnectionLimits(max_total=100, max_per_address=1)
    assert [bounds.add(host, number) for number in range(1, 4)] == [None] * 3


def test_malformed_requests_are_one_line_in_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as (own, bounds):
        with caplog.at_level(logging.INFO):
            ask(own, b"\x00\r\n")
        assert caplog.records == [], "nothing above debug"
        with caplog.at_level(logging.DEBUG, "minisgl_server.api.http.connection_limits"):
            for _ in range(20):
                ask(own, b"\x00\r\n")
            [record] = caplog.records
            assert "127.0.0.1: The request is not valid HTTP/1.1" in record.getMessage()
            bounds._next_log_s = 0.0
            ask(own, b"\x00\r\n")
    assert caplog.records[-1].getMessage().startswith("refused 20 connections or requests")
