"""Blocks of GGUF files, unpacked by torch on any device to the codes and scales of `PackedMatrix`.

The formats are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Scales keep the file's values: no
product is rounded.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from minisgl_backends.kernels.packed_matrix import PackedMatrix
from minisgl_backends.quantization.gguf_types import GgmlType

_CHUNK = 1 << 22
"""Weights that are unpacked at once, which bounds the temporary memory."""

Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, uint8 [rows, blocks, ...], then the bytes of scales and of superblocks that `Packing.kind` lists, uint8 [rows, ...]."""


def pack(matrix: PackedMatrix, row: int, kind: GgmlType, blocks: torch.Tensor) -> None:
    """Store the blocks of rows `row` and on of a matrix: the file's bytes, int8 [rows, bytes per row]."""
    unpack = _UNPACK[kind.name]
    step = max(1, _CHUNK // matrix.num_inputs)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step].view(torch.uint8)
        codes, scales, superblocks = unpack(part.view(len(part), -1, kind.block_bytes))
        rows = matrix.rows_of(row + start, len(part))
        matrix.store(rows, codes.flatten(1), _words(scales), None if superblocks is None else _words(superblocks))


def _words(fields: torch.Tensor) -> torch.Tensor:
    """Return bytes, uint8 [rows, ...], as int32 [rows, words]; the last word may be incomplete."""
    flat = fields.flatten(1)
    return F.pad(flat, (0, -flat.shape[1] % 4)).contiguous().view(torch.int32)


def _split(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes, [..., n], into codes, [..., 8 / bits, n], the lowest bits first."""
    return torch.stack([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -2)


def _grouped(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Split the last dimension into `count` groups, [..., count, n]."""
    return packed.reshape(*packed.shape[:-1], count, -1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of 4 bytes in order, [..., 32], as bit 4 of codes."""
    return _split(packed, 1).transpose(-1, -2).flatten(-2) << 4


def _q3_k(block: torch.Tensor) -> Unpacked:
    low = _split(_grouped(block[..., 32:96], 2), 2).flatten(-3)
    low_scales, high_scales = _split(block[..., 96:104], 4).flatten(-2), _split(block[..., 104:108], 2).flatten(-2)
    return (
        low | _split(block[..., :32], 1).flatten(-2) << 2,
        (low_scales | high_scales << 4) - 32,  # wraps around in uint8: the bytes are those of int8
        F.pad(block[..., 108:], (0, 2)),  # the superblock has a scale and no minimum, which becomes 0
    )


def _q5_k(block: torch.Tensor) -> Unpacked:
    low = _split(_grouped(block[..., 48:], 4), 4).flatten(-3)
    codes = low | _split(block[..., 16:48], 1).flatten(-2) << 4
    return codes, _k_scales(block), _negative_min(block[..., :4])


def _q6_k(block: torch.Tensor) -> Unpacked:
    low = _split(_grouped(block[..., :128], 2), 4).flatten(-3)
    high = _split(_grouped(block[..., 128:192], 2), 2).flatten(-3)
    return low | high << 4, block[..., 192:208], F.pad(block[..., 208:], (0, 2))


def _k_scales(block: torch.Tensor) -> torch.Tensor:
    """Return the pairs of scale and minimum of Q4_K and Q5_K, uint8 [..., 8, 2], which have 6 bits each."""
    first, second, third = _grouped(block[..., 4:16], 3).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return torch.stack((scales, mins), -1)


def _negative_min(halves: torch.Tensor) -> torch.Tensor:
    """Negate the second float16 of 4 bytes: ggml subtracts the minima of K-quants."""
    return halves ^ halves.new_tensor([0, 0, 0, 128])


_UNPACK: Mapping[str, Callable[[torch.Tensor], Unpacked]] = {
    "Q4_0": lambda block: (_split(block[..., 2:], 4), block[..., :2], None),
    "Q4_1": lambda block: (_split(block[..., 4:], 4), block[..., :4], None),
    "Q5_0": lambda block: (_split(block[..., 6:], 4).flatten(-2) | _fifth_bits(block[..., 2:6]), block[..., :2], None),
    "Q5_1": lambda block: (_split(block[..., 8:], 4).flatten(-2) | _fifth_bits(block[..., 4:8]), block[..., :4], None),
    "Q8_0": lambda block: (block[..., 2:] ^ 128, block[..., :2], None),  # int8 as uint8 with the zero point 128
    "Q2_K": lambda block: (_split(_grouped(block[..., 16:80], 2), 2), block[..., :16], _negative_min(block[..., 80:])),
    "Q3_K": _q3_k,
    "Q4_K": lambda block: (_split(_grouped(block[..., 16:], 4), 4), _k_scales(block), _negative_min(block[..., :4])),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Functions that unpack blocks, uint8 [rows, blocks, bytes], by GGML type."""
