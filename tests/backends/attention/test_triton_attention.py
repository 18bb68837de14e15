from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from minisgl_backends.attention.triton_backend import TritonAttention
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.testing.attention_kit import AttentionBackendTests


class TestTriton(AttentionBackendTests):
    """Compiled on a GPU, interpreted elsewhere."""

    backend = TritonAttention
    device = "cuda" if torch.cuda.is_available() else "cpu"
    page_sizes = (1, 16, 64) if torch.cuda.is_available() else (4,)
    dtypes = (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float32,)


SPEC = AttentionSpec(8, 2, 64, 16, torch.bfloat16, torch.bfloat16, torch.device("cpu"), 4096, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU it asks for is there")
def test_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "needs an NVIDIA GPU, not cpu" in TritonAttention.unsupported(SPEC)[0]
    assert "no NVIDIA GPU" in TritonAttention.unsupported(replace(SPEC, device=torch.device("cuda")))[0]
    odd = replace(SPEC, dtype=torch.float64, head_dim=80)
    assert [
        word in reason
        for word, reason in zip(("GPU", "float64", "pool", "80"), TritonAttention.unsupported(odd), strict=True)
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'minisgl-backends[triton]'" in TritonAttention.unsupported(SPEC)[0]


def test_asking_imports_no_triton() -> None:
    code = """
import sys
from minisgl_backends.attention.triton_backend import TritonAttention
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from minisgl_core.contracts.attention import AttentionSpec
TritonAttention.unsupported(AttentionSpec(8, 2, 64, 16, torch.float32, torch.float32, torch.device("cpu"), 4096, 64))
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bfloat16_and_a_long_sequence_split_many_times() -> None:
    """Too much for the whole kit under the interpreter."""
    kit = TestTriton()
    kit.run(kit.spec((4, 2, 64), 16, torch.bfloat16), decodes=[1, 3000, 257], prefills=[(2000, 3)])
