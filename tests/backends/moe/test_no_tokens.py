"""Outputs of experts for a step without tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from minisgl_backends.moe.triton_grouped import sum_experts


def test_outputs_without_tokens_are_empty() -> None:
    out = torch.empty(0, 8)
    sum_experts(torch.empty(0, 8), out)
    assert out.shape == (0, 8)
