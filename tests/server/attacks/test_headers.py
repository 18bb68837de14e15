"""Endless, many or slow headers, and idle connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlparse

import pytest

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
PADDING = b"a" * 2**16
TINY_HEADERS = b"a:\r\n" * 2**14


@contextmanager
def connections(url: str, count: int) -> Iterator[list[socket.socket]]:
    address = urlparse(url)
    with ExitStack() as stack:
        target = (address.hostname, address.port)
        yield [stack.enter_context(socket.create_connection(target, timeout=20)) for _ in range(count)]


def send(connection: socket.socket, data: bytes) -> bool:
    """Return False once the server accepts no more."""
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def flood(url: str, start: bytes, part: bytes, num_bytes: int) -> int:
    """Return the number of bytes that the server accepts of an endless request."""
    with connections(url, 1) as [connection]:
        send(connection, start)
        sent = 0
        while sent < num_bytes and send(connection, part):
            sent += len(part)
        return sent


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"GET /", PADDING),
        (HEAD + b"X: ", PADDING),
        (HEAD, PADDING),
        (HEAD, TINY_HEADERS),
        (b"", b"\r\n" * 2**15),
        (CHUNKED + b"1;", PADDING),
        (CHUNKED + b"0\r\nX: ", PADDING),
        (CHUNKED + b"0\r\n", TINY_HEADERS),
    ],
    ids=["line", "value", "name", "many", "blank-lines", "chunk-extension", "trailer", "trailers"],
)
def test_endless_headers_are_refused(
    attacked: Any, withstands: Callable[[Any], Any], start: bytes, part: bytes
) -> None:
    with withstands(attacked):
        taken = flood(attacked.url, start, part, 60 * 10**6)
    # The kernel buffers of both sides hold several megabytes.
    assert taken < 30 * 10**6


def test_unfinished_headers_over_many_connections(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    with withstands(attacked), connections(attacked.url, 1000) as opened:
        for connection in opened:
            send(connection, HEAD + b"X: " + b"a" * 200_000)
        time.sleep(2)


def test_a_thousand_slow_connections(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    with withstands(attacked), connections(attacked.url, 1000) as opened:
        for letter in (b"G", b"E", b"T", b" ", b"/"):
            for connection in opened:
                send(connection, letter)
            time.sleep(0.5)


def test_endless_pipelined_requests(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    with withstands(attacked):
        taken = flood(attacked.url, b"", (HEAD + b"\r\n") * 1500, 20 * 10**6)
    assert taken < 15 * 10**6
