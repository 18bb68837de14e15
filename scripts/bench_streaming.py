"""Measure the CPU time per streamed token of each process of a launch, with or without Ray Serve.

    python scripts/bench_streaming.py --streams 1 16 64 --tokens 400
    python scripts/bench_streaming.py --streams 1 16 64 --tokens 400 -- --executor ray --replicas 1:2

Options after ``--`` go to ``minisgl launch``. The script is the client. What the processes use without requests is subtracted.
Tokens that arrive together are sent together, so there are fewer chunks than tokens on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import psutil

ROLES = {
    "ProxyActor": "proxy of Serve",
    "ServeReplica:minisgl:API": "API",
    "minisgl: api": "API",
    "minisgl: launch": "API",  # without Ray, the launcher runs the API server
    "minisgl: tokenizer": "tokenizer",
    "ServeReplica:minisgl-engines": "engine replica",
    "minisgl: engine": "engine rank",
}
"""Beginning of a process's title, and its name in the output. All others are daemons of Ray."""


IDLE_S = 10.0


def role(process: psutil.Process) -> str:
    """Return the name of a process in the output."""
    title = " ".join(process.cmdline())
    return next((name for part, name in ROLES.items() if part in title), "others")


def cpu_times(root: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds of a process and all its descendants by role."""
    seconds: dict[str, float] = defaultdict(float)
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds[role(each)] += times.user + times.system
    return seconds


async def stream(port: int, num_tokens: int) -> list[float]:
    """Return the time of arrival of each chunk of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = {"prompt": "Once upon a time", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(payload).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    times, tail = [], b""
    while piece := await reader.read(1 << 16):
        times.append(time.perf_counter())
        tail = (tail + piece)[-64:]
    writer.close()
    assert b"[DONE]" in tail, tail
    return times[1:]  # the first are the headers


def idle_rates(root: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds per second without requests by role."""
    before = cpu_times(root)
    time.sleep(IDLE_S)
    after = cpu_times(root)
    return {name: (after[name] - before[name]) / IDLE_S for name in after}


def measure(root: psutil.Process, port: int, num_streams: int, num_tokens: int, idle: dict[str, float]) -> None:
    """Print the CPU time per token by role, and the times between chunks."""

    async def run() -> list[list[float]]:
        return await asyncio.gather(*(stream(port, num_tokens) for _ in range(num_streams)))

    before, begin = cpu_times(root), time.perf_counter()
    arrivals = asyncio.run(run())
    wall, after = time.perf_counter() - begin, cpu_times(root)
    total = num_streams * num_tokens
    gaps = sorted(1e3 * (b - a) for times in arrivals for a, b in pairwise(times))
    costs = {name: 1e6 * (after[name] - before[name] - wall * idle.get(name, 0)) / total for name in after}
    first = statistics.median(times[0] for times in arrivals) - begin
    print(
        f"{num_streams} streams of {num_tokens} tokens, {total / wall:,.0f} tokens/s,"
        f" {sum(map(len, arrivals)) / total:.2f} chunks per token, the first after {1e3 * first:.0f} ms,"
        f" between chunks {statistics.median(gaps):.2f} ms (p99 {gaps[int(0.99 * len(gaps))]:.2f})"
    )
    print(
        "   ", ", ".join(f"{name} {costs[name]:.0f}" for name in sorted(costs)), "µs of CPU time per token", flush=True
    )


def main(arguments: Sequence[str]) -> None:
    """Launch, measure, and end the launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="numbers of concurrent streams")
    parser.add_argument("--tokens", type=int, default=400, help="tokens per stream")
    parser.add_argument("launch", nargs="*", help="options of minisgl launch, after --")
    options = parser.parse_args(arguments)
    program = [sys.executable, "-c", "from minisgl_core.cli.main import main; main()", "launch", "--port", "0"]
    with subprocess.Popen([*program, *options.launch], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        banner = ""
        while not (found := re.search(r"Serving at http://\S+:(\d+)", banner)):
            line = process.stdout.readline()
            assert line, banner
            banner += line
        root, port = psutil.Process(process.pid), int(found[1])
        try:
            asyncio.run(stream(port, 32))
            idle = idle_rates(root)
            for num_streams in options.streams:
                measure(root, port, num_streams, options.tokens, idle)
        finally:
            process.terminate()


if __name__ == "__main__":
    main(sys.argv[1:])
