"""Thousands of requests to a live server, a third of which clients abort at random moments.

MINISGL_SOAK_REQUESTS sets the number of requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import httpx
import psutil
import pytest
import tiny
import tiny_folder

NUM_REQUESTS = int(os.environ.get("MINISGL_SOAK_REQUESTS", "900"))
NUM_CLIENTS = 24
NUM_PROMPTS = 40
LONGEST_ANSWER_S = 60.0
WARM_UP = 0.4
"""Fraction of the requests after which memory must be constant."""
GROWTH_BYTES = 8 * 2**20


@dataclass
class Traffic:
    """Traffic of the clients, and its results."""

    address: tuple[str, int]
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    num_started: int = 0
    num_aborted: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    texts: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shared = [[5, 9, 3, 7, 11, 30, 31, 32, 33], [5, 9, 3, 7, 12], []]
        for place in range(NUM_PROMPTS):
            own = self.draw.choices(range(3, tiny.VOCAB_SIZE), k=self.draw.randint(1, 40))
            self.prompts.append(shared[place % 3] + own)

    async def run_client(self) -> None:
        """Send one request after another, until NUM_REQUESTS have started."""
        while self.num_started < NUM_REQUESTS:
            self.num_started += 1
            await (self.abort() if self.num_started % 3 == 0 else self.finish())

    async def send(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request without an HTTP library, which would be slower, and could not abort at any moment."""
        reader, writer = await asyncio.open_connection(*self.address)
        data = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return reader, writer

    async def finish(self) -> None:
        """Complete a request, and compare its text with that of earlier equal requests."""
        which, length, stream = self.draw.randrange(NUM_PROMPTS), self.draw.randint(1, 12), self.draw.random() < 0.5
        reader, writer = await self.send({"prompt": self.prompts[which], "max_tokens": length, "stream": stream})
        answer = await asyncio.wait_for(reader.read(), LONGEST_ANSWER_S)
        head, _, body = answer.partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200"), head + body
        if stream:
            events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
            assert events[-1] == b"[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        else:
            choices = json.loads(body)["choices"]
        assert choices[-1]["finish_reason"] == "length"
        text = "".join(choice["text"] for choice in choices)
        assert self.texts.setdefault((which, length), text) == text

    async def abort(self) -> None:
        """Abort a request immediately, after a moment, or after a part of the response."""
        moment, stream = self.draw.choice(["at once", "later", "midway"]), self.draw.random() < 0.7
        prompt, n = self.prompts[self.draw.randrange(NUM_PROMPTS)], self.draw.choice([1, 1, 2])
        reader, writer = await self.send({"prompt": prompt, "max_tokens": 150, "stream": stream, "n": n})
        if moment == "later":
            await asyncio.sleep(self.draw.uniform(0, 0.1))
        elif moment == "midway" and stream:
            for _ in range(self.draw.randint(1, 30)):
                await asyncio.wait_for(reader.readline(), LONGEST_ANSWER_S)
        writer.transport.abort()
        self.num_aborted += 1


async def soak(server: Any, traffic: Traffic) -> dict[str, list[int]]:
    """Run the clients. Return memory in bytes of each process, sampled after the warm-up at regular counts of requests."""
    processes = {name: each for name, each in server.children().items() if "python" not in name}
    processes["launch"] = psutil.Process(server.process.pid)
    samples: dict[str, list[int]] = {name: [] for name in processes}
    clients = asyncio.gather(*(traffic.run_client() for _ in range(NUM_CLIENTS)))
    next_at = int(WARM_UP * NUM_REQUESTS)
    while not clients.done():
        if traffic.num_started >= next_at:
            next_at += max(1, NUM_REQUESTS // 20)
            for name, process in processes.items():
                samples[name].append(process.memory_info().rss)
        await asyncio.sleep(0.05)
    await clients
    return samples


def wait_for_zero(url: str) -> dict[str, int]:
    """Wait until the server counts no requests, as the last aborts take a moment."""
    deadline = time.monotonic() + 20
    while True:
        counts: dict[str, int] = httpx.get(f"{url}/health/requests", timeout=60).json()
        if not any(counts.values()) or time.monotonic() > deadline:
            return counts
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_soak(launch: Callable[..., Any]) -> None:
    flags = {"--model": tiny_folder.llama(), "--dtype": "float32", "--ops": "torch", "--num-tokenizers": 2}
    flags |= {"--page-size": 4, "--num-pages": 400, "--max-running-requests": 16, "--max-prefill-length": 32}
    server = launch(*(str(part) for flag in flags.items() for part in flag), "--no-disable-overlap").wait_started()
    url = urlparse(server.url)
    traffic = Traffic((str(url.hostname), int(url.port or 0)))
    samples = asyncio.run(soak(server, traffic))

    counts = wait_for_zero(server.url)
    assert set(counts) == {"api", "tokenizer 0", "tokenizer 1", "waiting", "running", "locked pages"}
    assert not any(counts.values()), counts
    assert traffic.num_aborted == NUM_REQUESTS // 3
    for name, sizes in samples.items():
        # The minima of the first and of the last samples: uncollected garbage is no leak.
        growth = min(sizes[-4:]) - min(sizes[:4])
        print(f"{name}: {min(sizes[:4]) >> 20} MiB after the warm-up, {growth / 2**20:+.1f} MiB at the end")
        assert growth < GROWTH_BYTES, f"{name} grew: {sizes}"
    assert server.stderr() == ""
    assert (
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "w5", "max_tokens": 1}, timeout=60).status_code
        == 200
    )
