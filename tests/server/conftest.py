from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import psutil
import pytest


class Server:
    """Process of ``minisgl launch``, on a free port.

    `log` replaces the file of standard error that tests can read; `environ` has further environment variables.
    """

    def __init__(self, *flags: str, log: IO[str] | None = None, **environ: str) -> None:
        self.sockets = tempfile.mkdtemp(prefix="t-", dir="/tmp")
        cache = f"{tempfile.gettempdir()}/torchinductor"  # by default in TMPDIR, which must be empty in the end
        variables = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_CACHE_DIR": cache, **os.environ}
        environ = {**variables, "TMPDIR": self.sockets, **environ}
        self.log = log or tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the server
        self.process = subprocess.Popen(
            [
                os.environ.get("MINISGL_COMMAND") or Path(sys.executable).with_name("minisgl"),
                "launch",
                "--port",
                "0",
                *flags,
            ],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.banner = ""
        self.url = ""

    def wait_started(self) -> Server:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.banner += line
            if found := re.fullmatch(r"Serving at (http://.*)/v1\n", line):
                self.url = found[1]
            if line.startswith("curl "):
                return self
        self.process.wait()
        raise AssertionError(f"launch ended with {self.process.returncode}: {self.stderr()}")

    def stderr(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def children(self) -> dict[str, psutil.Process]:
        """Return the child processes with a title, by title, and Python's resource tracker."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {child.cmdline()[0].removeprefix("minisgl: "): child for child in found}

    def wait_ended(self) -> int:
        """Return the exit status, and check that no process is left."""
        status = self.process.wait(180)
        assert os.listdir(self.sockets) == []
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(180)
        self.process.stdout.close()  # type: ignore[union-attr]
        self.log.close()
        Path(self.sockets).rmdir()


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[Server]:
    """Server of the embedded model, shared by all tests, so that no test may break it."""
    flags = ["--dtype", "float32", "--num-tokenizers", "2", "--num-pages", "1200", "--max-running-requests", "32"]
    flags += ["--quantization", "none"]  # transformers dequantizes the weights, too
    made = Server(*flags, "--tool-call-parser", "hermes")
    yield made.wait_started()
    made.close()


def launcher() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*flags: str, **options: Any) -> Server:
        servers.append(Server(*flags, **options))
        return servers[-1]

    yield make
    for each in servers:
        each.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Server]]:
    """Launch servers with the given flags, and end them after the test."""
    yield from launcher()


@pytest.fixture(scope="module")
def launch_shared() -> Iterator[Callable[..., Server]]:
    """Launch servers that the tests of a module share."""
    yield from launcher()


@pytest.fixture
def start(launch: Callable[..., Server], tiny_checkpoint: Path) -> Callable[..., Server]:
    """Launch servers of the tiny model with the given flags, and end them after the test."""
    return partial(launch, "--model", str(tiny_checkpoint), "--num-pages", "1100")


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=250) as made:
        yield made


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=250) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, engine_tokenizer: Any) -> Path:
    """Llama with two layers of random weights, which loads and runs quickly, with SmolLM2's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=len(engine_tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16384,
        eos_token_id=2,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    engine_tokenizer.save_pretrained(folder)
    return folder
