"""1,000 concurrent streams: each gets its own output or a refusal, and resources of disconnected clients are freed."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
import tiny
import tiny_folder

from minisgl_core import LLM, SamplingParams

pytestmark = pytest.mark.slow

NUM_STREAMS = 1000
NUM_VANISH = 300
NUM_TOKENS = 16
NUM_CHECKED = 20
"""Number of outputs of the engine that are compared with transformers."""
FOREVER = 4000
"""Output tokens of requests that are aborted; they would take as many steps."""
A_SECOND_OF_STEPS = 1000
FLAGS = {"--model": tiny_folder.llama(), "--dtype": "float32", "--ops": "torch", "--num-tokenizers": 2}
PATIENCE_S = 250.0


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    """Raise this process's limit of open files for the clients' connections."""
    with open_files(4 * NUM_STREAMS):
        yield


@contextmanager
def open_files(num: int) -> Iterator[None]:
    """Set the limit of open files for this process, and for processes that it starts in the context."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.fixture(scope="module")
def expected_texts() -> dict[tuple[int, ...], str]:
    """Return distinct prompts, and their outputs by the engine alone."""
    draw = random.Random(5)
    prompts = [draw.choices(range(3, tiny.VOCAB_SIZE), k=draw.randint(4, 24)) for _ in range(NUM_STREAMS)]
    with LLM(tiny_folder.llama(), dtype="float32", ops="torch", platform="cpu", num_pages=500) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
    for prompt, output in list(zip(prompts, outputs, strict=True))[:NUM_CHECKED]:
        assert tuple(output.token_ids) == tiny.greedy(tuple(prompt), NUM_TOKENS)
    found = {tuple(prompt): output.text for prompt, output in zip(prompts, outputs, strict=True)}
    assert len(found) == NUM_STREAMS
    assert len(set(found.values())) > 0.9 * NUM_STREAMS, "nearly all texts are distinct"
    return found


class Stream:
    """Client without an HTTP library, which would be slower, and could not abort at any moment."""

    def __init__(self, url: str) -> None:
        self._address = urlparse(url)

    async def connect(self) -> None:
        self.reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)

    def send(self, prompt: tuple[int, ...], max_tokens: int = NUM_TOKENS) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)

    async def wait_for_response(self) -> None:
        """Wait for the first line of the response."""
        assert (await self.reader.readline()).startswith(b"HTTP/1.1 200 ")

    async def read_response(self) -> tuple[int, str]:
        """Return status, and the text or the error's code. The response must be complete."""
        head, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        self._writer.close()
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            return status, json.loads(body)["error"]["code"]
        events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        return status, "".join(choice["text"] for choice in choices)

    async def disconnect(self, draw: random.Random) -> None:
        """Close or reset the connection, immediately or after a part of the response."""
        if draw.random() < 0.7:
            for _ in range(draw.randint(1, 30)):
                await self.reader.readline()
        (self._writer.transport.abort if draw.random() < 0.5 else self._writer.close)()


async def connected(url: str, num: int = NUM_STREAMS) -> list[Stream]:
    streams = [Stream(url) for _ in range(num)]
    for stream in streams:
        await stream.connect()
    return streams


def run(test: Callable[[], Any]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(limited())


def started(launch: Callable[..., Any], **flags: Any) -> Any:
    named = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return launch(*(str(part) for flag in named.items() for part in flag)).wait_started()


@pytest.fixture(scope="module")
def server(launch_shared: Callable[..., Any]) -> Any:
    """Server that accepts all streams, with a lower limit of open files, which it has to raise."""
    with open_files(256):
        return started(launch_shared, max_running_requests=128, num_pages=1000)


def test_all_requests_complete(server: Any, expected_texts: dict[tuple[int, ...], str]) -> None:
    async def test() -> None:
        streams = await connected(server.url)
        for stream, prompt in zip(streams, expected_texts, strict=True):
            stream.send(prompt)
        got = await asyncio.gather(*(stream.read_response() for stream in streams))
        assert got == [(200, text) for text in expected_texts.values()]

    run(test)
    assert server.stderr() == ""


def test_requests_of_disconnected_clients_are_freed(server: Any, expected_texts: dict[tuple[int, ...], str]) -> None:
    draw = random.Random(6)
    disconnected = set(draw.sample(range(NUM_STREAMS), NUM_VANISH))

    async def test() -> None:
        streams = await connected(server.url)
        for place, (stream, prompt) in enumerate(zip(streams, expected_texts, strict=True)):
            stream.send(prompt, FOREVER if place in disconnected else NUM_TOKENS)
        gone = asyncio.gather(*(streams[place].disconnect(draw) for place in disconnected))
        stay = [place for place in range(NUM_STREAMS) if place not in disconnected]
        got = await asyncio.gather(*(streams[place].read_response() for place in stay))
        texts = list(expected_texts.values())
        assert got == [(200, texts[place]) for place in stay]
        await gone

    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        before = http.get("/engine/state").json()["totals"]
        run(test)
        all_gone_at = http.get("/engine/state").json()["step"]
        # The scheduler may get the last aborts after the API server has stopped counting the requests.
        while (
            any(http.get("/health/requests").json().values())
            or (state := http.get("/engine/state").json())["num_running"]
        ):
            assert http.get("/engine/state").json()["step"] < all_gone_at + A_SECOND_OF_STEPS
    assert state["num_running"] == state["num_waiting"] == len(state["requests"]) == 0
    assert state["pages"]["num_private"] == state["pages"]["num_locked"] == 0
    ended, aborted = (state["totals"][name] - before[name] for name in ("num_finished", "num_aborted"))
    assert ended - aborted == NUM_STREAMS - NUM_VANISH
    assert aborted > 0
    assert server.stderr() == ""


def test_requests_beyond_the_queue_are_refused_others_complete(
    launch: Callable[..., Any], expected_texts: dict[tuple[int, ...], str]
) -> None:
    """Most come at once to a short queue. The rest come during shutdown, which endless streams delay."""
    server = started(launch, max_running_requests=16, max_queued_requests=50, num_pages=1000, drain_timeout=PATIENCE_S)
    num_late = NUM_STREAMS // 4

    async def test() -> None:
        endless, streams = await connected(server.url, 2), await connected(server.url)
        for stream in endless:
            stream.send((5, 9, 3), FOREVER)
            await stream.wait_for_response()
        pairs = list(zip(streams, expected_texts, strict=True))
        for stream, prompt in pairs[num_late:]:
            stream.send(prompt)
        early = asyncio.gather(*(stream.read_response() for stream in streams[num_late:]))
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            server.process.send_signal(signal.SIGTERM)
            while (await http.get("/ready")).status_code != 503:
                pass
        for stream, prompt in pairs[:num_late]:
            stream.send(prompt)
        late = await asyncio.gather(*(stream.read_response() for stream in streams[:num_late]))
        assert late == [(503, "shutting_down")] * num_late
        for stream in endless:
            await stream.disconnect(random.Random(7))
        refusals = Counter[tuple[int, str]]()
        for got, text in zip(await early, list(expected_texts.values())[num_late:], strict=True):
            if got[0] == 200:
                assert got == (200, text)
            refusals[got if got[0] != 200 else (200, "")] += 1
        assert set(refusals) <= {(200, ""), (429, "queue_full"), (503, "shutting_down")}
        assert refusals[200, ""] >= 50
        assert refusals[429, "queue_full"] > 0

    run(test)
    assert server.wait_ended() == 0
    assert server.stderr() == ""
