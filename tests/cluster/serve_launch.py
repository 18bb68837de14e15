"""Replicas on a Ray cluster with Ray Serve."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
from launched import DEADLINE_S, Launched
from ray_node import RayNode


class Service:
    """API at `url`, which is `root` with /v1. The model's name is m."""

    url: str
    root: str
    client: openai.OpenAI

    def connect(self, url: str) -> None:
        self.url, self.root = url, url.removesuffix("/v1")
        self.client = openai.OpenAI(base_url=url, api_key="none", timeout=DEADLINE_S, max_retries=0)

    def stream(self, started: threading.Semaphore, num_tokens: int, prompt: str = "w5 w9") -> list[str]:
        """Return the text of each event of a stream, and its finish reason, or the code or type of its error."""
        body = {"ignore_eos": True}
        pieces: list[str] = []
        try:
            events = self.client.completions.create(
                model="m", prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True, extra_body=body
            )
            for event in events:
                if not pieces:
                    started.release()
                pieces.append(event.choices[0].text)
                if event.choices[0].finish_reason:
                    pieces.append(event.choices[0].finish_reason)
        except openai.APIError as error:
            pieces.append(str(error.code or type(error).__name__))
        return pieces

    def texts(self, prompts: Sequence[str], num_tokens: int) -> list[str]:
        """Return the texts of concurrent streams, which must not fail."""

        def text(prompt: str) -> str:
            *pieces, finish_reason = self.stream(threading.Semaphore(0), num_tokens, prompt)
            assert finish_reason == "length"
            return "".join(pieces)

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(text, prompts))

    def generated_tokens(self) -> dict[str, float]:
        """Return the number of generated tokens by replica."""
        return self.metric("minisgl_generation_tokens_total")

    def metric(self, name: str) -> dict[str, float]:
        """Return the values of a metric by replica."""
        text = httpx.get(f"{self.root}/metrics", timeout=DEADLINE_S).raise_for_status().text
        found = re.findall(rf'{name}\{{model_name="m",replica="(\w+)"\}} ([\d.]+)', text)
        return {replica: float(value) for replica, value in found}


class Launch(Launched, Service):
    """Launch with replicas on the cluster of `node`."""

    def __init__(self, node: RayNode, *flags: str) -> None:
        fixed = "--host 0.0.0.0 --num-pages 8000 --drain-timeout 60 --served-model-name m"
        super().__init__(node, *fixed.split(), *flags)

    def wait_started(self) -> Launch:
        self.read_banner("Serving at")
        port = re.search(r"Serving at http://\S+:(\d+)/v1", self.banner)[1]  # type: ignore[index]
        self.connect(f"http://{self.node.address}:{port}/v1")
        return self


def engines(node: RayNode) -> list[psutil.Process]:
    """Return the schedulers of the engines on a node."""
    return node.processes("minisgl: engine rank 0")


def wait_for_engines(nodes: list[RayNode], num: int, other_than: Sequence[psutil.Process] | None = None) -> None:
    """Wait until the nodes run `num` engines, of which some are not in `other_than`."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := [each for node in nodes for each in engines(node)]) != num or found == other_than:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def wait_for_two_replicas(service: Service, nodes: list[RayNode]) -> None:
    """Wait until two replicas respond and the processes of both engines have started."""
    wait_for_engines(nodes, 2)
    deadline = time.monotonic() + DEADLINE_S
    while len(service.generated_tokens()) < 2:
        assert time.monotonic() < deadline
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: service.stream(threading.Semaphore(0), 4), range(8)))
