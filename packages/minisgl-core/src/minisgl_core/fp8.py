"""Numbers of eight bits: float8_e4m3fn, four bits of exponent and three of mantissa (arXiv 2209.05433)."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number; there is no infinity."""
LEAST_SCALE = 1e-12
"""Of a row; rows of zeros have it."""


def to_fp8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``x / scale`` in float8; what is too large becomes the largest number, which casts alone do in some versions of torch."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
