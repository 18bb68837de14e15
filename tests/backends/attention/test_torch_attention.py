from __future__ import annotations

import torch

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.testing.attention_kit import AttentionBackendTests


class TestTorchAttention(AttentionBackendTests):
    backend = TorchAttention
    page_sizes = (1, 5, 16)
    dtypes = (torch.float32, torch.bfloat16)
