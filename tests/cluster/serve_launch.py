"""Launches of replicas on a Ray cluster by Ray Serve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from tempfile import TemporaryFile

import openai
from ray_node import RayNode

DEADLINE_S = 90.0


class Launch:
    """A ``minisgl launch`` on `node`, with replicas on its cluster."""

    def __init__(self, node: RayNode, *flags: str) -> None:
        self.node = node
        program = [*node.prefix, sys.executable, "-c", "from minisgl_core.cli.main import main; main()", "launch"]
        fixed = "--executor ray --host 0.0.0.0 --port 0 --platform cpu --dtype float32 --num-pages 8000"
        fixed += " --drain-timeout 60 --served-model-name m"
        environ = {**os.environ, "RAY_ADDRESS": node.head, "OMP_NUM_THREADS": "1"}
        self.errors = TemporaryFile("w+")  # noqa: SIM115  # closed with the launch
        self.process = subprocess.Popen(
            [*program, *fixed.split(), *flags], env=environ, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.banner = ""

    def wait_started(self) -> Launch:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.banner += line
            if line.startswith("Serving at"):
                break
        assert "Serving at" in self.banner, (self.process.wait(), self.stderr())
        port = re.search(r"Serving at http://\S+:(\d+)/v1", self.banner)[1]  # type: ignore[index]
        self.url = f"http://{self.node.address}:{port}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", timeout=DEADLINE_S, max_retries=0)
        return self

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(DEADLINE_S)
        self.process.stdout.close()  # type: ignore[union-attr]
        self.errors.close()

    def stream(self, started: threading.Semaphore, num_tokens: int) -> list[str]:
        """Text of each event of one stream; the last item is its finish reason or error."""
        body = {"ignore_eos": True}
        pieces: list[str] = []
        try:
            events = self.client.completions.create(
                model="m", prompt="w5 w9", max_tokens=num_tokens, temperature=0, stream=True, extra_body=body
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
