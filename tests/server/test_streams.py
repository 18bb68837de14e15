"""A thousand streams at once: each gets its own answer or a refusal, and what clients leave behind is freed."""

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
"""Answers of the engine alone that are compared with transformers'."""
FOREVER = 4000
"""Tokens of an answer that nobody waits for to its end: as many steps as that, were it not for an abort."""
A_SECOND_OF_STEPS = 1000
FLAGS = {"--model": tiny_folder.llama(), "--dtype": "float32", "--ops": "torch", "--num-tokenizers": 2}
PATIENCE_S = 250.0


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    """This process holds the clients' ends of all the connections."""
    with open_files(4 * NUM_STREAMS):
        yield


@contextmanager
def open_files(num: int) -> Iterator[None]:
    """Have this process, and what it starts meanwhile, begin with this limit of open files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, ...], str]:
    """Prompts, each of its own, and what the engine alone makes of them."""
    draw = random.Random(5)
    prompts = [draw.choices(range(3, tiny.VOCAB_SIZE), k=draw.randint(4, 24)) for _ in range(NUM_STREAMS)]
    with LLM(tiny_folder.llama(), dtype="float32", ops="torch", platform="cpu", num_pages=500) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
    for prompt, output in list(zip(prompts, outputs, strict=True))[:NUM_CHECKED]:
        assert tuple(output.token_ids) == tiny.greedy(tuple(prompt), NUM_TOKENS)
    found = {tuple(prompt): output.text for prompt, output in zip(prompts, outputs, strict=True)}
    assert len(found) == NUM_STREAMS
    assert len(set(found.values())) > 0.9 * NUM_STREAMS, "nearly every answer tells whose it is"
    return found


class Stream:
    """One client, without an HTTP library: this side must cost little, and hang up whenever it likes."""

    def __init__(self, url: str) -> None:
        self._address = urlparse(url)

    async def connect(self) -> None:
        self.reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)

    def send(self, prompt: tuple[int, ...], max_tokens: int = NUM_TOKENS) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)

    async def first(self) -> None:
        """Wait until there is an answer."""
        assert (await self.reader.readline()).startswith(b"HTTP/1.1 200 ")

    async def answer(self) -> tuple[int, str]:
        """Status, and the text or the error's code. The server must have said all, and ended."""
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

    async def vanish(self, draw: random.Random) -> None:
        """Hang up, by an end or a reset of the connection: at once, or after some of the answer."""
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
    """A server that takes them all, under a limit of open files that does not: it has to raise it."""
    with open_files(256):
        return started(launch_shared, max_running_requests=128, num_pages=1000)


def test_all_requests_complete(server: Any, answers: dict[tuple[int, ...], str]) -> None:
    async def test() -> None:
        streams = await connected(server.url)
        for stream, prompt in zip(streams, answers, strict=True):
            stream.send(prompt)
        got = await asyncio.gather(*(stream.answer() for stream in streams))
        assert got == [(200, text) for text in answers.values()]

    run(test)
    assert server.stderr() == ""


def test_disconnected_clients_requests_are_freed_within_a_second(
    server: Any, answers: dict[tuple[int, ...], str]
) -> None:
    draw = random.Random(6)
    vanish = set(draw.sample(range(NUM_STREAMS), NUM_VANISH))

    async def test() -> None:
        streams = await connected(server.url)
        for place, (stream, prompt) in enumerate(zip(streams, answers, strict=True)):
            stream.send(prompt, FOREVER if place in vanish else NUM_TOKENS)
        gone = asyncio.gather(*(streams[place].vanish(draw) for place in vanish))
        stay = [place for place in range(NUM_STREAMS) if place not in vanish]
        got = await asyncio.gather(*(streams[place].answer() for place in stay))
        texts = list(answers.values())
        assert got == [(200, texts[place]) for place in stay]
        await gone

    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        before = http.get("/engine/state").json()["totals"]
        run(test)
        all_gone_at = http.get("/engine/state").json()["step"]
        # The last aborts may still be on their way to the scheduler when the API server counts no request.
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
    launch: Callable[..., Any], answers: dict[tuple[int, ...], str]
) -> None:
    """Most come at once, to a short queue; the rest come when the server shuts down, which endless streams hold up."""
    server = started(launch, max_running_requests=16, max_queued_requests=50, num_pages=1000, drain_timeout=PATIENCE_S)
    num_late = NUM_STREAMS // 4

    async def test() -> None:
        endless, streams = await connected(server.url, 2), await connected(server.url)
        for stream in endless:
            stream.send((5, 9, 3), FOREVER)
            await stream.first()
        asked = list(zip(streams, answers, strict=True))
        for stream, prompt in asked[num_late:]:
            stream.send(prompt)
        early = asyncio.gather(*(stream.answer() for stream in streams[num_late:]))
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            server.process.send_signal(signal.SIGTERM)
            while (await http.get("/ready")).status_code != 503:
                pass
        for stream, prompt in asked[:num_late]:
            stream.send(prompt)
        late = await asyncio.gather(*(stream.answer() for stream in streams[:num_late]))
        assert late == [(503, "shutting_down")] * num_late
        for stream in endless:
            await stream.vanish(random.Random(7))
        refusals = Counter[tuple[int, str]]()
        for got, text in zip(await early, list(answers.values())[num_late:], strict=True):
            if got[0] == 200:
                assert got == (200, text)
            refusals[got if got[0] != 200 else (200, "")] += 1
        assert set(refusals) <= {(200, ""), (429, "queue_full"), (503, "shutting_down")}
        assert refusals[200, ""] >= 50
        assert refusals[429, "queue_full"] > 0

    run(test)
    assert server.wait_ended() == 0
    assert server.stderr() == ""
