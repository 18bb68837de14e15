from __future__ import annotations

import torch

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES


class TestTorchAttention(AttentionBackendTests):
    backend = TorchAttention
    page_sizes = (1, 5, 16)
    dtypes = (torch.float32, torch.bfloat16)
    # Scores and weights are rounded to bfloat16 on their way through memory, as in transformers' eager attention.
    tolerances = TOLERANCES | {torch.bfloat16: 0.15}
