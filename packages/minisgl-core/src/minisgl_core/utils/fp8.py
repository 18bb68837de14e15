"""FP8 conversion: float8_e4m3fn, with four exponent bits and three mantissa bits (arXiv 2209.05433)."""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite value; the format has no infinity."""
LEAST_SCALE = 1e-12
"""Lower bound of a row's scale, used for rows of zeros."""


def to_fp8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return ``x / scale`` in float8, saturated. Casts alone saturate only in some versions of torch."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
