"""Launches of replicas on a Ray cluster by Ray Serve."""

from __future__ import annotations

import re
import threading

import openai
from launched import DEADLINE_S, Launched
from ray_node import RayNode


class Launch(Launched):
    """A launch with replicas on the cluster of `node`."""

    def __init__(self, node: RayNode, *flags: str) -> None:
        fixed = "--host 0.0.0.0 --num-pages 8000 --drain-timeout 60 --served-model-name m"
        super().__init__(node, *fixed.split(), *flags)

    def wait_started(self) -> Launch:
        self.read_banner("Serving at")
        port = re.search(r"Serving at http://\S+:(\d+)/v1", self.banner)[1]  # type: ignore[index]
        self.url = f"http://{self.node.address}:{port}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", timeout=DEADLINE_S, max_retries=0)
        return self

    def stream(self, started: threading.Semaphore, num_tokens: int, prompt: str = "w5 w9") -> list[str]:
        """Text of each event of one stream; the last item is its finish reason or error."""
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
            pieces.append(str(error.code))
        return pieces
