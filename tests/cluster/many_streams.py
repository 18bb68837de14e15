"""Many concurrent streams during a fault: each ends with its whole text or with one error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlparse

import httpx


def payload(prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}


async def raw_stream(url: str, prompt: str, max_tokens: int, started: Callable[[], None]) -> bytes:
    """Return the whole response. A client library would be slower than the engines."""
    address = urlparse(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(payload(prompt, max_tokens, stream=True)).encode()
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


def count_errors(
    url: str, prompts: Sequence[str], num_streams: int, fault: Callable[[], None], max_tokens: int = 24
) -> int:
    """Check the streams of these prompts in turn. `fault` runs when a fifth of them have sent text.

    Args:
        url: address of the server, without /v1.
        prompts: the prompts; each is completed alone first.
        num_streams: number of concurrent streams.
        fault: takes a replica away.
        max_tokens: number of tokens per stream.

    Returns:
        The number of streams that ended with an error.
    """
    post = httpx.Client(base_url=url, timeout=200).post
    alone = [post("/v1/completions", json=payload(each, max_tokens, stream=False)).json() for each in prompts]
    texts = [each["choices"][0]["text"] for each in alone]
    num_started = 0

    def started() -> None:
        nonlocal num_started
        num_started += 1
        if num_started == num_streams // 5:
            fault()

    async def run() -> list[bytes]:
        streams = (
            raw_stream(url, prompts[number % len(prompts)], max_tokens, started) for number in range(num_streams)
        )
        return await asyncio.gather(*streams)

    num_errors = 0
    for number, answer in enumerate(asyncio.run(run())):
        events, expected = events_of(answer), texts[number % len(prompts)]
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
    return num_errors
