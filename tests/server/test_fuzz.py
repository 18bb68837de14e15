"""Malformed requests from a seeded generator: bodies, headers, framing, and aborted connections.

MINISGL_FUZZ_REQUESTS sets the number of requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any
from urllib.parse import urlparse

import httpx
import psutil
import pytest
import tiny
import tiny_folder

from minisgl_server.api.http.limited_protocol import MAX_PIPELINED

NUM_REQUESTS = int(os.environ.get("MINISGL_FUZZ_REQUESTS", "5000"))
SEED = 11
NUM_CLIENTS = 16
NUM_IDLE = 100
"""Number of connections that stay idle, or send a part of a request."""
NUM_SAMPLES = 20
GROWTH_BYTES = 2**20
"""Limit per quarter of the requests."""
ANSWER_S = 150.0
"""Timeout that is longer than any response of this test."""

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5 w9"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "w5 w9", "max_tokens": 2, "stop": ["w7"]},
    "/v1/responses": {"input": "w5 w9", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "w5 w9"},
    "/v1/messages": {"messages": [{"role": "user", "content": "w5 w9"}], "max_tokens": 2, "system": "w3"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "w5 w9"}]},
    "/generate": {"text": "w5 w9", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "w5 w9"},
    "/detokenize": {"tokens": [5, 9]},
}
"""Valid bodies."""
NUMBERS = ("max_tokens", "n", "temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "min_tokens")
ERROR_TYPES = {"invalid_request_error", "not_found_error", "permission_error", "request_too_large"}
"""OpenAI's type of all refusals, and Anthropic's types on its paths."""
HUGE = ("1e999", "-1e999", "9" * 400, "-" + "9" * 400, "NaN", "Infinity", "-Infinity", "0x10", "1.")
JUNK = ("null", "[]", "{}", "true", "5", '"x"', "", " ", "\x00", "[[]]", "{}{}", "nul", "{,}", "[1,]", '{"a"}', "'x'")


class Fuzz:
    """Generates malformed requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def bytes(self, most: int) -> bytes:
        return self.draw.randbytes(self.draw.randint(0, most))

    def body(self) -> tuple[str, bytes]:
        """Return a path, and a body that is invalid there."""
        path = self.draw.choice(list(BODIES))
        fine = dict(BODIES[path])
        text = json.dumps(fine).encode()
        match self.draw.randrange(11):
            case 0:
                return path, text[: self.draw.randrange(len(text))]
            case 1:
                return path, self.draw.choice(JUNK).encode()
            case 2:
                return path, b"\xff" + self.bytes(300)
            case 3:
                name = self.draw.choice(list(fine))
                fine[name] = self.draw.choice([True, {"a": 1}, -1, 1.5, [None], [[["x"]]], [{}], {"": []}])
                return path, json.dumps(fine).encode()
            case 4:
                return path, json.dumps({**fine, self.draw.choice(["", "x", "\x00", "Prompt", "é" * 50]): 1}).encode()
            case 5:
                return path, json.dumps({**fine, "model": self.draw.choice(["other", "", "\x00", "x" * 5000])}).encode()
            case 6:
                opening, closing = self.draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
                depth = self.draw.choice([201, 1000, 20000])
                name = self.draw.choice([*fine, "chat_template_kwargs", "logit_bias"]).encode()
                return path, b'{"%s":%s1%s}' % (name, opening * depth, closing * depth)
            case 7:
                number = self.draw.choice(HUGE)
                path = self.draw.choice(["/v1/completions", "/v1/chat/completions"])
                head = json.dumps(BODIES[path])[:-1].replace('"max_tokens": 2', '"user": "x"')
                return path, f'{head}, "{self.draw.choice(NUMBERS)}": {number}}}'.encode()
            case 8:
                place = self.draw.randrange(len(text))
                return path, text[:place] + self.draw.choice([b"\x00", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8"]) + text[
                    place:
                ]
            case 9:
                return path, text.replace(b"w5", rb"\ud800").replace(b"[5,", b"[5e0,")
            case _:
                path = self.draw.choice(["/v1/completions", "/v1/chat/completions"])
                wrong = self.draw.choice(['"1"', "[1]", '{"a": 1}', "true"])
                return path, f'{json.dumps(BODIES[path])[:-1]}, "{self.draw.choice(NUMBERS)}": {wrong}}}'.encode()

    def unknown_route(self) -> tuple[str, str]:
        """Return a method and a path without a route."""
        known = [*BODIES, "/v1/models", "/health", "/metrics", "/engine/state"]
        match self.draw.randrange(5):
            case 0:
                return self.draw.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"]), self.draw.choice(
                    known
                )
            case 1:
                return "GET", self.draw.choice(list(BODIES))
            case 2:
                ups = self.draw.choice(["../", "%2e%2e/", "..%2f", "%00", "//", "%5c..%5c", "%ff"])
                folder = self.draw.choice(["/web_ui/", "/", "/v1/models/"])
                return "GET", folder + ups * self.draw.randint(1, 9) + "etc/passwd"
            case 3:
                return (
                    "GET",
                    f"/engine/state?since={self.draw.choice(['-1', 'x', '1e3', '9' * 30, '%00', '1&since=x'])}",
                )
            case _:
                name = "".join(self.draw.choices("abc%/.?#~+", k=self.draw.randint(1, 400)))
                return self.draw.choice(["GET", "POST"]), f"/x{name}"

    def headers(self) -> bytes:
        """Return unusual but valid headers."""
        made = [
            b"%s: %s\r\n" % (name, self.draw.choice(values)) for name, values in STRANGE if self.draw.random() < 0.15
        ]
        if self.draw.random() < 0.03:
            made += [
                b"X-%d: %s\r\n" % (number, b"x" * self.draw.choice([0, 10, 600]))
                for number in range(self.draw.randint(1, 90))
            ]
        return b"".join(made)

    def invalid_request(self, *, is_last: bool) -> bytes:
        """Return a complete request that the server must refuse."""
        if self.draw.random() < 0.8:
            path, data = self.body()
            head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode()
        else:
            (method, path), data = self.unknown_route(), b""
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        head += self.headers() + (b"Connection: close\r\n" if is_last else b"")
        if self.draw.random() < 0.2:
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(self.chunks(data)) + b"0\r\n\r\n"
        return head + b"Content-Length: %d\r\n\r\n" % len(data) + data

    def chunks(self, data: bytes) -> Iterator[bytes]:
        while data:
            size = self.draw.randint(1, len(data))
            yield b"%x\r\n%s\r\n" % (size, data[:size])
            data = data[size:]

    def malformed_http(self) -> bytes:
        """Send malformed HTTP, or part of a request."""
        path, data = self.body()
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode()
        whole = head + b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        match self.draw.randrange(9):
            case 0:
                return whole[: self.draw.randrange(len(whole))]
            case 1:
                length = self.draw.choice([b"-1", b"-5", b"+5", b"x", b"", b"1 2", b"9" * 40, b"0x5", b"5, 5", b"1.0"])
                return head + b"Content-Length: %s\r\n\r\n" % length + data
            case 2:
                return head + b"Content-Length: %d\r\n\r\n" % (len(data) + self.draw.randint(1, 10**9)) + data
            case 3:
                return head + b"Content-Length: %d\r\n\r\n" % (len(data) // 2) + data + b"\r\n\r\n"
            case 4:
                bad = self.draw.choice(
                    [
                        b"",
                        b"5\r\n{}",
                        b"zz\r\n{}\r\n",
                        b"-1\r\n{}\r\n",
                        b"f" * 17 + b"\r\n",
                        b"2\r\n{}{}\r\n",
                        b"2\r\n{}\r\n",
                    ]
                )
                return head + b"Transfer-Encoding: chunked\r\n\r\n" + bad
            case 5:
                both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\r\n0\r\n\r\n"
                return head + self.draw.choice(
                    [both, b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", b"Transfer-Encoding: x\r\n\r\n{}"]
                )
            case 6:
                bad = self.draw.choice(
                    [b"no colon\r\n", b": empty\r\n", b"a b: c\r\n", b"x: \x00\r\n", b"x: a\r\n b\r\n", b"x\x80: y\r\n"]
                )
                return head + bad * self.draw.randint(1, 50) + b"\r\n"
            case 7:
                return self.draw.choice(LINES) + self.draw.choice([b"", b"\r\n", b"Host: x\r\n\r\n"])
            case _:
                return self.bytes(self.draw.choice([1, 20, 3000]))


STRANGE = (
    (b"Content-Type", (b"text/plain", b"", b"application/json; charset=utf-16", b"\xff\xfe", b"multipart/form-data")),
    (b"Authorization", (b"Bearer \xff", b"Basic", b"Bearer " + b"x" * 9000, b"")),
    (b"Accept", (b"*/*;q=x", b"\x80")),
    (b"Accept-Encoding", (b"gzip, zstd;q=9", b"")),
    (b"Content-Encoding", (b"gzip", b"br")),
    (b"Cookie", (b"a=b" * 900, b"=;=;")),
    (b"X-Request-Id", (b"\xe9", b"x" * 200, b"a b", b"")),
    (b"Origin", (b"null", b"https://a.example")),
    (b"Range", (b"bytes=5-1", b"bytes=x")),
    (b"Host", (b"", b"a:b:c", b"\xff")),
    (b"X-Forwarded-For", (b"::1", b"x" * 500)),
)
LINES = (
    b"",
    b"GET",
    b"GET /nope\r\n",
    b"GET /nope HTTP/9.9\r\n",
    b"GET /nope HTTP/0.9\r\n",
    b"get /nope HTTP/1.1\r\n",
    b"BREW /nope HTTP/1.1\r\n",
    b"GET nope HTTP/1.1\r\n",
    b"GET /\x00 HTTP/1.1\r\n",
    b"GET /\xff HTTP/1.1\r\n",
    b"GET http://[::1 HTTP/1.1\r\n",
    b"GET //[ HTTP/1.1\r\n",
    b"CONNECT x:443 HTTP/1.1\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /nope HTTP/1.1\nHost: x\n\n",
    b"GET  /nope  HTTP/1.1\r\n",
)


def parse_refusals(data: bytes) -> list[int]:
    """Return the statuses of concatenated responses. Each must be complete, and a refusal in OpenAI's or Anthropic's format."""
    statuses = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, head
        status = re.match(rb"HTTP/1\.1 (4\d\d) ", head)
        assert status, head
        length = re.search(rb"\r\ncontent-length: (\d+)(\r\n|$)", head.lower())
        assert length, head
        body, data = data[: int(length[1])], data[int(length[1]) :]
        if status[1] == b"499":
            assert not data, "the client has closed its side"
            return [*statuses, int(status[1])]
        error = json.loads(body)["error"]
        assert error["message"], body
        assert error["type"] in ERROR_TYPES, body
        statuses.append(int(status[1]))
    return statuses


class Clients:
    """Sends the requests of `Fuzz`, and checks the responses."""

    def __init__(self, url: str) -> None:
        address = urlparse(url)
        self._address = str(address.hostname), int(address.port or 0)
        self._fuzz = Fuzz(SEED)
        self.num_sent = 0
        self.seen = Counter[int]()

    async def run(self) -> None:
        while self.num_sent < NUM_REQUESTS:
            await asyncio.wait_for(self._pipeline() if self._fuzz.draw.random() < 0.2 else self._cut(), ANSWER_S)

    async def open_idle_connections(self) -> list[asyncio.StreamWriter]:
        """Open connections with incomplete requests."""
        writers = []
        for number in range(NUM_IDLE):
            writers.append((await asyncio.open_connection(*self._address))[1])
            writers[-1].write(b"POST /generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"[: number % 60])
        return writers

    async def _pipeline(self) -> None:
        """Send several requests at once, each of which gets a response."""
        num = self._fuzz.draw.randint(1, MAX_PIPELINED)
        data = [self._fuzz.invalid_request(is_last=place == num - 1) for place in range(num)]
        self.num_sent += num
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(b"".join(data))
        statuses = parse_refusals(await reader.read())
        writer.close()
        assert len(statuses) == num, data
        self.seen.update(statuses)

    async def _cut(self) -> None:
        """Send malformed or partial requests, which end with a half-closed connection or a reset."""
        draw = self._fuzz.draw
        data, end = self._fuzz.malformed_http(), draw.choice(["half-close", "half-close", "reset", "close"])
        self.num_sent += 1
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(data)
            if end != "half-close":
                (writer.transport.abort if end == "reset" else writer.close)()
                return
            writer.write_eof()
            received = await reader.read()
            writer.close()
            self.seen.update(parse_refusals(received) or [0])


async def fuzz(server: Any) -> tuple[Clients, dict[str, list[int]]]:
    """Run the clients. Return memory in bytes of each process, sampled at regular counts of requests."""
    processes = {name: each for name, each in server.children().items() if "python" not in name}
    processes["launch"] = psutil.Process(server.process.pid)
    samples: dict[str, list[int]] = {name: [] for name in processes}
    clients = Clients(server.url)
    idle = await clients.open_idle_connections()
    running = asyncio.gather(*(clients.run() for _ in range(NUM_CLIENTS)))
    while not running.done():
        if clients.num_sent >= NUM_REQUESTS * len(samples["launch"]) / NUM_SAMPLES:
            for name, process in processes.items():
                samples[name].append(process.memory_info().rss)
        await asyncio.sleep(0.02)
    await running
    for writer in idle:
        writer.transport.abort()
    return clients, samples


@pytest.mark.slow
def test_random_requests_do_not_break_the_server(launch: Callable[..., Any]) -> None:
    flags = {"--model": tiny_folder.llama(), "--dtype": "float32", "--num-pages": 300, "--max-seq-len-override": 256}
    server = launch(*(str(part) for flag in flags.items() for part in flag), "--log-level", "error").wait_started()
    clients, samples = asyncio.run(fuzz(server))
    print(clients.seen)
    assert {400, 404, 405} <= set(clients.seen)

    with httpx.Client(base_url=server.url, timeout=ANSWER_S) as http:
        assert http.get("/health").status_code == 200
        while any(http.get("/health/requests").json().values()):
            time.sleep(0.02)
        body = {"prompt": [5, 9, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == tiny_folder.words(list(tiny.greedy((5, 9, 3), 8)))
    quarter = NUM_SAMPLES // 4
    for name, sizes in samples.items():
        # A leak grows in every quarter. Memory for the first request of a kind is allocated in one of them.
        least = [min(sizes[start : start + quarter]) for start in range(1, NUM_SAMPLES + 1, quarter)]
        growth = min(after - before for before, after in pairwise(least))
        print(f"{name}: {sizes[-1] >> 20} MiB, {growth / 2**20:+.1f} MiB")
        assert growth < GROWTH_BYTES, f"{name} grew: {sizes}"
    assert server.stderr() == ""
