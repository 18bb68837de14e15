"""1,000 concurrent streams while a replica is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

pytestmark = pytest.mark.nightly
NUM_STREAMS, NUM_PROMPTS, MAX_TOKENS = 1000, 40, 24


def payload(number: int, *, stream: bool) -> dict[str, Any]:
    text = f"{number % NUM_PROMPTS} green bottles hang on the wall"
    return {"prompt": text, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}


async def raw_stream(url: str, number: int, started: Callable[[], None]) -> bytes:
    """The whole answer. A client library would take longer than the engines."""
    address = urlparse(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(payload(number, stream=True)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer, has_started = b"", False
    while piece := await reader.read(65536):
        answer += piece
        if not has_started and b"\ndata: " in answer:
            has_started = True
            started()
    writer.close()
    return answer


def events_of(answer: bytes) -> list[Any]:
    head, _, chunks = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer[:500]
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body, chunks = body + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_every_stream_ends_with_its_own_text_or_one_error(launch: Any, tiny_checkpoint: Path) -> None:
    flags = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--num-pages", "6000", "--attn", "torch"]
    flags += ["--replicas", "2", "--router", "least-loaded", "--max-queued-requests", "2000"]
    server = launch(*flags, OMP_NUM_THREADS="1").wait_started()
    post = httpx.Client(base_url=server.url, timeout=200).post
    alone = [post("/v1/completions", json=payload(each, stream=False)).json() for each in range(NUM_PROMPTS)]
    texts = [each["choices"][0]["text"] for each in alone]
    num_started = 0

    def started() -> None:
        nonlocal num_started
        num_started += 1
        if num_started == NUM_STREAMS // 5:
            server.children()["replica 1 rank 0"].kill()

    async def run() -> list[bytes]:
        return await asyncio.gather(*(raw_stream(server.url, number, started) for number in range(NUM_STREAMS)))

    num_errors = 0
    for number, answer in enumerate(asyncio.run(run())):
        events, expected = events_of(answer), texts[number % NUM_PROMPTS]
        choices = [event["choices"][0] for event in events if event != "[DONE]" and "choices" in event]
        text = "".join(each["text"] for each in choices)
        if events[-1] == "[DONE]":
            assert text == expected
            assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length"]
        else:
            num_errors += 1
            assert [event["error"]["code"] for event in events if "error" in event] == ["replica_lost"]
            assert "error" in events[-1]
            assert expected.startswith(text)
            assert text
    assert 0 < num_errors < NUM_STREAMS // 2
    counts = httpx.get(f"{server.url}/health/requests", timeout=60).json()
    assert not any(counts.values()), counts
