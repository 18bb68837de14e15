from __future__ import annotations

import pytest
import torch

from minisgl_backends.attention.native_backend import NativeAttention
from minisgl_backends.native import library
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES

if reasons := library.unsupported(torch.device("cpu"), torch.float32):
    pytest.skip("; ".join(reasons), allow_module_level=True)


class TestNativeAttention(AttentionBackendTests):
    provider = NativeAttention
    page_sizes = (1, 5, 16)
    dtypes = (torch.float32,)


class TestNativeAttentionInBfloat16(AttentionBackendTests):
    """Scores of prefills are rounded to bfloat16, as in transformers' eager attention; so errors grow with their size."""

    provider = NativeAttention
    dtypes = (torch.bfloat16,)
    tolerances = TOLERANCES | {torch.bfloat16: 8e-2}
    test_scales = None  # type: ignore[assignment]
