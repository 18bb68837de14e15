"""Headers of request bodies, and the memory of all bodies."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from fastapi import Request

from minisgl_server.api.errors import ApiError
from minisgl_server.api.http.request_body import BodyMemory, read_body
from minisgl_server.api.limits import RequestLimits

LIMITS = RequestLimits({}, max_chars=2**20, max_values=1000, max_body_bytes=2**20)
TEXT = b'{"prompt": "' + b"once upon a time " * 1000 + b'"}'


def read(
    data: bytes, step: int = 1000, memory: BodyMemory | None = None, limits: RequestLimits = LIMITS, **headers: str
) -> bytes:
    """Read the body of a request that comes chunk by chunk."""
    chunks = [data[place : place + step] for place in range(0, len(data), step)] or [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    given = {"content-type": "application/json"} | {name.replace("_", "-"): each for name, each in headers.items()}
    named = [(name.encode(), each.encode("latin-1")) for name, each in given.items() if each]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": named}, receive)
    with (memory or BodyMemory()).reserve(limits) as count:
        return bytes(asyncio.run(read_body(request, limits, count)))


def refusal(data: bytes, step: int = 1000, **headers: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(data, step, **headers)
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        "application/json",
        "application/json; charset=utf-8",
        'Application/JSON;charset="UTF8"',
        "application/problem+json",
        "application/vnd.api.v1+json",
        "",
    ],
)
def test_json_content_types_are_accepted(given: str) -> None:
    assert read(TEXT, content_type=given) == TEXT


@pytest.mark.parametrize(
    "given",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
        "application/jsonp",
        "text/plain; application/json",
        "\xff",
    ],
)
def test_other_content_types_are_refused_with_a_remedy(given: str) -> None:
    error = refusal(TEXT, content_type=given)
    assert (error.status, error.code) == (415, "unsupported_media_type")
    assert "-H 'Content-Type: application/json'" in error.message


def test_requests_with_an_origin_need_a_json_content_type() -> None:
    assert refusal(TEXT, content_type="", origin="https://a.example").status == 415
    assert read(TEXT, origin="https://a.example") == TEXT


@pytest.mark.parametrize("name", ["gzip", "br", "zstd"])
def test_compressed_bodies_are_refused(name: str) -> None:
    assert refusal(TEXT, content_encoding=name).status == 415
    assert read(TEXT, content_encoding="identity") == TEXT


def test_too_many_concurrent_large_bodies_are_refused() -> None:
    memory = BodyMemory()
    with ExitStack() as others:
        for _ in range(4):
            others.enter_context(memory.reserve(LIMITS))(2**20)
        with memory.reserve(LIMITS) as count:
            count(2**20)
            with pytest.raises(ApiError) as caught:
                count(1)
    assert (caught.value.status, caught.value.code) == (429, "too_many_requests")
    with memory.reserve(LIMITS) as count:
        count(3 * 2**20)


def test_the_connection_of_a_refused_body_is_closed() -> None:
    memory, limits = BodyMemory(), replace(LIMITS, max_body_bytes=2**21)
    with memory.reserve(limits) as count:
        count(4 * 2**21)
        with pytest.raises(ApiError) as caught:
            read(b" " * (2**20 + 1), memory=memory, limits=limits)
    assert (caught.value.status, caught.value.headers["Connection"]) == (429, "close")
