"""Norms whose weights have an offset, and the check of activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.errors import ModelFormatError
from minisgl_core.layers import RMSNorm, check_activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_1_equals_gemmas_norm(dtype: torch.dtype) -> None:
    """The sum of 1 and the weight must not be rounded to bfloat16."""
    tolerance = 1e-6
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    expected = Gemma2RMSNorm(24, eps=1e-3).to(dtype)
    expected.weight.data.copy_(torch.randn(24, generator=generator) / 4)
    norm = RMSNorm(24, 1e-3, BuildContext(SingleRank(), Ops.of(device, dtype), device, dtype), weight_offset=1.0)
    [(_, target)] = norm.weight_targets("norm", {})
    target.destination.copy_(expected.weight.data)
    norm.prepare()
    x, residual = torch.randn(2, 5, 24, generator=generator).to(dtype)
    assert (norm.forward(x) - expected(x)).abs().max() <= tolerance
    found, total = norm.add(x.clone(), residual.clone())
    assert torch.equal(total, x + residual)
    assert (found - expected(x + residual)).abs().max() <= tolerance


def test_unknown_activations_are_refused() -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {"architectures": ["X"], "max_position_embeddings": 8, **dict.fromkeys(sizes, 8), "head_dim": 2}
    silu = model_config(raw)
    gelu = replace(silu, hidden_act="gelu_pytorch_tanh")
    check_activation(silu)
    check_activation(gelu, "gelu_pytorch_tanh")
    with pytest.raises(ModelFormatError, match="hidden_act='gelu_pytorch_tanh' is not supported; only 'silu' is"):
        check_activation(gelu)
    with pytest.raises(ModelFormatError, match="hidden_act='silu' is not supported; only 'gelu' or 'gelu_new' is"):
        check_activation(silu, "gelu", "gelu_new")
