"""A live server under attack, a concurrent stream of another client, and the memory of every process."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

MAX_GAP_S = 2.0
"""Longest time between two chunks of the concurrent stream; on a busy machine, four times the longest without an attack."""
MAX_GROWTH_BYTES = 300 * 10**6
"""Growth of any process of the server, measured every 20 ms. Without bfloat16 on the processor, logits take twice the memory."""


class ConcurrentStream(threading.Thread):
    """Streams completions one after another, and records the longest time between two chunks."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._ends = url, threading.Event()
        self.begins, self.goes_on = threading.Event(), threading.Event()
        self.max_gap_s = self.idle_gap_s = 0.0
        self.num_chunks = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        # Greedy, since `iter_lines` also ends lines at U+2028 and the like, which samples may contain.
        body = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True, "temperature": 0}
        try:
            with httpx.Client(timeout=60) as client:
                while not self._ends.is_set():
                    with client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
                        assert response.status_code == 200, response.read()
                        self._read(response)
        except BaseException as error:
            self.error = error
        finally:
            self.begins.set()
            self.goes_on.set()

    def wait_for_chunk(self) -> None:
        """Wait for the end of the current gap."""
        self.goes_on.clear()
        assert not self.is_alive() or self.goes_on.wait(60), "the concurrent stream hangs"
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self._ends.set()
        self.join(60)
        assert not self.is_alive(), "the concurrent stream hangs"

    def _read(self, response: httpx.Response) -> None:
        last = None
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            assert "error" not in json.loads(line[6:]), line
            now = time.perf_counter()
            if last is not None:
                self.max_gap_s = max(self.max_gap_s, now - last)
            last = now
            self.num_chunks += 1
            self.goes_on.set()
            if self.num_chunks == 10:
                self.max_gap_s = 0.0  # the stream warms up before
            elif self.num_chunks == 40:
                self.idle_gap_s = self.max_gap_s
                self.begins.set()
            if self._ends.is_set():
                return


class MemoryWatch(threading.Thread):
    """Samples the resident memory of every process of a server, without page-cache pages of mapped files.

    Processes that start during the attack count with all of their memory.
    """

    def __init__(self, children: Callable[[], dict[str, psutil.Process]]) -> None:
        super().__init__(daemon=True)
        self._children, self._ends = children, threading.Event()
        self._processes = children()
        self._before = {process.pid: self._rss(process) for process in self._processes.values()}
        self.growth = dict.fromkeys(self._processes, 0)

    def run(self) -> None:
        num_samples = 0
        while not self._ends.wait(0.02):
            num_samples += 1
            if num_samples % 5 == 0:
                self._look_for_new()
            for name, process in self._processes.items():
                growth = self._rss(process) - self._before.get(process.pid, 0)
                self.growth[name] = max(self.growth.get(name, 0), growth)

    def end(self) -> None:
        self._ends.set()
        self.join()

    def _look_for_new(self) -> None:
        with contextlib.suppress(psutil.Error, IndexError):  # a process has ended
            self._processes |= self._children()

    @staticmethod
    def _rss(process: psutil.Process) -> int:
        try:
            memory = process.memory_info()
        except psutil.NoSuchProcess:
            return 0
        return int(memory.rss - memory.shared)


@pytest.fixture(scope="module")
def withstands(launch_shared: Callable[..., Any]) -> Iterator[Callable[[Any], Any]]:
    """Context manager: run an attack beside a concurrent stream, then check gap, memory and the next request.

    A module's attacks share the stream.
    """
    streams: list[ConcurrentStream] = []

    @contextmanager
    def during(server: Any) -> Iterator[None]:
        if not streams or not streams[-1].is_alive():
            streams.append(ConcurrentStream(server.url))
            streams[-1].start()
            assert streams[-1].begins.wait(60)
        stream = streams[-1]
        stream.max_gap_s = 0.0
        memory = MemoryWatch(server.children)
        memory.start()
        try:
            yield
            time.sleep(0.2)  # delayed effects of the attack happen now
        finally:
            memory.end()
        stream.wait_for_chunk()
        print(f"longest gap {stream.max_gap_s:.3f} s over {stream.num_chunks} chunks, growth {memory.growth}")
        assert max(memory.growth.values()) <= MAX_GROWTH_BYTES, memory.growth
        limit_s = max(MAX_GAP_S, 4 * stream.idle_gap_s)
        assert stream.max_gap_s <= limit_s, f"the innocent stream stood still for {stream.max_gap_s:.2f} s"
        body = {"prompt": "One two three", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text

    yield during
    for stream in streams:
        stream.end()


@pytest.fixture(scope="module")
def attacked(launch_shared: Callable[..., Any]) -> Any:
    """Server of the embedded model with default options."""
    return launch_shared("--max-running-requests", "32", OMP_NUM_THREADS="1").wait_started()
