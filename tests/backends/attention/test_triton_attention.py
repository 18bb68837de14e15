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


class TestTritonWithTwoColumnBlocks(TestTriton):
    """Heads that are not a power of two."""

    head_shapes = ((4, 2, 192), (2, 2, 80), (6, 2, 96))

    @pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, FP8)])
    @pytest.mark.parametrize("head_dim", [80, 96, 112, 120, 160, 192])
    def test_head_dims(self, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Decodes in one and in several partitions, and prefills."""
        spec = replace(self.spec((4, 2, head_dim), 16, dtype), kv_dtype=kv_dtype)
        self.run(spec, decodes=[1, 20, 300], prefills=[(5, 18), (30, 40)])


@pytest.mark.nightly
def test_a_sequence_in_many_partitions_matches_the_reference() -> None:
    """The whole kit would take too long in the interpreter."""
    kit = TestTriton()
    spec = kit.spec((4, 2, 64), 16, torch.bfloat16)
    kit.run(spec, decodes=[1, 3000, 257], prefills=[(2000, 3)])
    for shape in ((4, 2, 64), (2, 2, 128)):
        kit.run(replace(kit.spec(shape, 16, torch.bfloat16), kv_dtype=FP8), decodes=[1, 600], prefills=[(300, 3)])
