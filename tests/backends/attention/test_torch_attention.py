from __future__ import annotations

import torch

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES


class TestTorchAttention(AttentionBackendTests):
    provider = TorchAttention
    page_sizes = (1, 5, 16)
    dtypes = (torch.float32,)


class TestTorchAttentionInBfloat16(AttentionBackendTests):
    """Scores are rounded to bfloat16, as in transformers' eager attention; so errors grow with their size."""

    provider = TorchAttention
    dtypes = (torch.bfloat16,)
    tolerances = TOLERANCES | {torch.bfloat16: 8e-2}
    test_scales = None  # type: ignore[assignment]
