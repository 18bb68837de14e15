"""Ranks and replicas on two GPUs of one host, with Ray and Ray Serve."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_folder
import torch
from launched import DEADLINE_S
from ray_node import RayNode
from serve_launch import Launch, engines, wait_for_two_replicas

from minisgl_core import LLM, SamplingParams

ray = pytest.importorskip("ray", reason="ray is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
PROMPTS = ["w5 w9", "w5 w9 w7", "w40 w41 w42 w43", "w5 w9 w8 w7 w6 w5"]
NUM_TOKENS = 24
ENGINE_MIB = 250
"""Lower bound of the GPU memory of an engine: its CUDA context needs as much."""


@lru_cache
def checkpoint(model_type: str) -> str:
    """Return a folder with a tiny random model of GPU-friendly sizes, and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=tiny.EOS,
        pad_token_id=0,
        **(experts if model_type == "qwen3_moe" else {}),
    )
    torch.manual_seed(7)
    folder = tempfile.mkdtemp(prefix=f"two-gpus-{model_type}-")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_folder.save_tokenizer(Path(folder))
    return folder


def texts(model_type: str, **options: Any) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(checkpoint(model_type), dtype="float32", attn="triton", num_pages=500, **options) as llm:
        return [output.text for output in llm.generate(PROMPTS, params)]


@lru_cache
def texts_of_one_gpu(model_type: str) -> list[str]:
    return texts(model_type)


def used_mib() -> list[int]:
    """Return the used memory of each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


@pytest.fixture(scope="module")
def node() -> Iterator[RayNode]:
    """Cluster of this host."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = RayNode(folder, f"127.0.0.1:{20000 + os.getpid() % 10000}", "127.0.0.1", 8, ())
        try:
            yield made.wait_started()
        finally:
            made.stop()


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_two_ranks_generate_the_tokens_of_one(
    ranks: dict[str, Any], model_type: str, node: RayNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = texts_of_one_gpu(model_type)
    monkeypatch.setenv("RAY_ADDRESS", node.head)
    assert texts(model_type, executor="ray", **ranks) == expected


def test_replicas_use_separate_gpus_and_return_after_a_failure(node: RayNode) -> None:
    expected, before = texts_of_one_gpu("llama"), used_mib()
    flags = ["--replicas", "2", "--platform", "cuda", "--attn", "triton"]
    launch = Launch(node, "--model", checkpoint("llama"), *flags).wait_started()
    try:
        assert launch.texts(2 * PROMPTS, NUM_TOKENS) == 2 * expected
        wait_for_two_replicas(launch, [node])
        assert all(now - then > ENGINE_MIB for now, then in zip(used_mib(), before, strict=True))
        assert all(launch.generated_tokens().values())

        started = threading.Semaphore(0)
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(launch.stream, started, 2000) for _ in range(4)]
            for _ in streams:
                assert started.acquire(timeout=DEADLINE_S)
            engines(node)[0].kill()
            assert {stream.result(DEADLINE_S)[-1] for stream in streams} == {"length", "replica_lost"}
        wait_for_two_replicas(launch, [node])
        assert launch.texts(2 * PROMPTS, NUM_TOKENS) == 2 * expected
    finally:
        launch.close()
    assert not engines(node)
    assert all(now - then < ENGINE_MIB for now, then in zip(used_mib(), before, strict=True))
