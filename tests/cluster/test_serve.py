"""Replicas on a Ray cluster by Ray Serve: ``minisgl launch --executor ray --replicas``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryFile
from typing import Any

import openai
import pytest
from ray_node import RayNode

pytest.importorskip("ray", reason="ray is not installed")

DEADLINE_S = 90.0
QUESTION: Any = [{"role": "user", "content": "What is the capital of Germany?"}]


class Launch:
    """A ``minisgl launch`` with replicas on the cluster of `node`."""

    def __init__(self, node: RayNode, *flags: str) -> None:
        program = [sys.executable, "-c", "from minisgl_core.cli.main import main; main()", "launch"]
        fixed = "--executor ray --port 0 --platform cpu --dtype float32 --num-pages 8000 --drain-timeout 60"
        fixed += " --served-model-name m"
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
        self.url = re.search(r"Serving at (http://\S+/v1)", self.banner)[1]  # type: ignore[index]
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


@pytest.fixture(scope="module")
def launch(node: RayNode) -> Iterator[Launch]:
    made = Launch(node, "--replicas", "2").wait_started()
    yield made
    made.close()


def test_streams_of_the_openai_client_are_the_text_of_one_engine(launch: Launch) -> None:
    from minisgl_core import LLM, SamplingParams

    with LLM(platform="cpu", dtype="float32", num_pages=200) as llm:
        expected = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=24))[0].text

    def ask(_: int) -> str:
        stream = launch.client.chat.completions.create(
            model="m", messages=QUESTION, temperature=0, max_tokens=24, stream=True
        )
        return "".join(event.choices[0].delta.content or "" for event in stream)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(6))) == {expected}
