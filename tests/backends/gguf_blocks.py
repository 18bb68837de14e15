"""Random blocks of GGUF files, for tests of kernels on CPUs and GPUs."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from minisgl_core.testing.packed_checkpoint import Packed, PackedCheckpoint, PackedModule

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
"""Byte offsets of the float16 numbers in a block; 0 and 2 in other types."""


class Everything(dict[str, str]):
    """Mapping that has one GGML type for all modules."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def get(self, key: object, default: object = None) -> str:  # type: ignore[override]
        return self.kind


def checkpoint(kind: str) -> PackedCheckpoint:
    """Return a format whose matrices have one GGML type; rows of incomplete blocks are not quantized."""

    def pack(weight: torch.Tensor) -> Packed:
        if weight.shape[1] % 32:
            return {"weight": weight}, weight
        blocks = gguf.quantize(weight.numpy(), Kind[kind])
        return {"qweight": torch.from_numpy(blocks.view(np.int8))}, torch.from_numpy(
            gguf.dequantize(blocks, Kind[kind])
        )

    return PackedCheckpoint({"quant_method": "gguf", "types": Everything(kind)}, pack)


def random_blocks(kind: str, rows: int, columns: int, norm: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bytes with small scales, int8 [rows, bytes per row], and their dequantized values, float32.

    If `norm` is given, the rows' norms are about that.
    """
    width, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rng = np.random.default_rng(rows)
    blocks = rng.integers(0, 256, (rows, columns // width, size), dtype=np.uint8)
    for place in SCALES.get(kind, (0, 2)):
        scales = (rng.standard_normal((rows, columns // width, 1)) / 100).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    flat = blocks.reshape(rows, -1)
    if norm:
        factor = norm / np.linalg.norm(gguf.dequantize(flat, Kind[kind]), axis=1).mean()
        for place in SCALES.get(kind, (0, 2)):
            scales = np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16) * np.float16(factor)
            blocks[..., place : place + 2] = scales.view(np.uint8)
    return torch.from_numpy(flat.view(np.int8)), torch.from_numpy(gguf.dequantize(flat, Kind[kind]))


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def random_experts(
    kinds: tuple[str, str, str], hidden: int, inner: int, num_experts: int
) -> tuple[dict[str, str], dict[str, PackedModule]]:
    """Return the given GGML types of the projections of the experts ``m``, and the experts' modules."""
    modules, types = {}, {}
    for place, (projection, kind) in enumerate(zip(PROJECTIONS, kinds, strict=True)):
        types[f"m.{projection}"] = kind
        for expert in range(num_experts):
            rows, columns = (hidden, inner) if projection == "down_proj" else (inner, hidden)
            # The number of rows seeds the values.
            blocks, weight = random_blocks(kind, rows + num_experts * place + expert, columns)
            modules[f"m.{expert}.{projection}"] = PackedModule({"qweight": blocks[:rows]}, weight[:rows])
    return types, modules
