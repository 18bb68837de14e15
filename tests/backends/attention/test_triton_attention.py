from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl_backends.attention.triton_backend import TritonAttention
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.utils.fp8 import FP8

pytestmark = pytest.mark.slow


class TestTriton(AttentionBackendTests):
    """Compiled on a GPU, interpreted elsewhere."""

    provider = TritonAttention
    device = "cuda" if torch.cuda.is_available() else "cpu"
    page_sizes = (1, 16, 64) if torch.cuda.is_available() else (4,)
    dtypes = (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float32,)


@pytest.mark.nightly
def test_a_sequence_in_many_partitions_matches_the_reference() -> None:
    """The whole kit would take too long in the interpreter."""
    kit = TestTriton()
    spec = kit.spec((4, 2, 64), 16, torch.bfloat16)
    kit.run(spec, decodes=[1, 3000, 257], prefills=[(2000, 3)])
    for shape in ((4, 2, 64), (2, 2, 128)):
        kit.run(replace(kit.spec(shape, 16, torch.bfloat16), kv_dtype=FP8), decodes=[1, 600], prefills=[(300, 3)])
