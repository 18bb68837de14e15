"""FP8 checkpoints with the three formats of scales."""

from __future__ import annotations

import torch

from minisgl_core.testing.packed_checkpoint import Packed, PackedCheckpoint
from minisgl_core.utils.fp8 import FP8, FP8_MAX

BLOCK = (40, 24)
"""Block shape that shards split on purpose; real checkpoints have 128 by 128."""


def _packed(weight: torch.Tensor, sizes: tuple[int, int]) -> Packed:
    """Quantize in blocks; ``weight_scale`` has one value per block."""
    height, width = sizes
    rows, columns = (-(-length // size) for length, size in zip(weight.shape, sizes, strict=True))
    padded = torch.zeros(rows * height, columns * width)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, height, columns, width)
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(1e-12)
    each = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / each).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * each


def compressed(strategy: str) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": strategy}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


PER_TENSOR = PackedCheckpoint({"quant_method": "fp8"}, lambda weight: _packed(weight, (len(weight), weight.shape[1])))
PER_CHANNEL = PackedCheckpoint(compressed("channel"), lambda weight: _packed(weight, (1, weight.shape[1])))
BLOCKS = PackedCheckpoint(
    {"quant_method": "fp8", "weight_block_size": list(BLOCK)}, lambda weight: _packed(weight, BLOCK)
)
