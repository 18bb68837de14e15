from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES, dense_attention


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


def test_dense_attention_has_the_sinks_of_transformers() -> None:
    """The kit compares backends with `dense_attention`, which this test compares with gpt-oss."""
    generator = torch.Generator().manual_seed(0)
    q, sinks = torch.randn(7, 4, 8, generator=generator), torch.randn(4, generator=generator)
    k, v = torch.randn(2, 7, 2, 8, generator=generator)
    mask = torch.full((7, 7), -torch.inf).triu(1)
    heads = (each.transpose(0, 1)[None] for each in (q, k, v))
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    expected = eager_attention_forward(module, *heads, mask, scaling=0.3)[0][0]
    found = dense_attention(q, k, v, AttentionLayer(0, 0.3, sinks=sinks))
    assert (found - expected).abs().max() < 1e-5
