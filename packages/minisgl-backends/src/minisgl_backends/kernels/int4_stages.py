"""Packed 4-bit weights in the order in which ``cuda/int4_gemm.cu`` reads them: the codes and scales of its pipeline stages.

A stage has 2 * 64 outputs and 128 inputs: two neighbouring tiles, or a tile of gate outputs and one of up outputs.

Shape legend: T tiles and C chunks as `minisgl_backends.kernels.int4_weight` describes them, S scales per output and chunk.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dequantize import dequantize_int4
from minisgl_backends.kernels.int4_weight import Int4Weight
from minisgl_backends.kernels.packed_matrix import TILE

INPUTS = 128
"""Inputs per stage."""
CODE_BYTES = TILE * INPUTS // 2
"""Size of the codes of a tile in a stage."""
SCALE_BYTES = TILE * 4
"""Size of one word of scales for each output of a tile."""
_INPUTS = tl.constexpr(INPUTS)
_CODE_BYTES = tl.constexpr(CODE_BYTES)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)


def supports_weight(weight: Int4Weight) -> bool:
    """Return True if one of INPUTS and the inputs per scale is a multiple of the other."""
    return INPUTS % weight.block == 0 or weight.block % INPUTS == 0


def pack_stages(weight: Int4Weight, words: torch.Tensor) -> torch.Tensor:
    """Return the weight in stages.

    Args:
        weight: a weight for which `supports_weight` is True.
        words: scales and zero points of 16 bits each, int32 [B, T * 64]; see `int4_gemm.scale_words`.

    Returns:
        uint8 [blocks of 2 * 64 outputs, C, 2, CODE_BYTES + SCALE_BYTES * S]. A scale for several stages is repeated in each.
    """
    codes = fragment_order(weight.codes)
    tiles, chunks = codes.shape[:2]
    num_scales = max(1, INPUTS // weight.block)
    if weight.gated:
        pairs = torch.arange(tiles, device=codes.device).view(2, -1).t()
    else:  # an odd last tile is paired with itself
        pairs = torch.arange(-(-tiles // 2) * 2, device=codes.device).clamp_(max=tiles - 1).view(-1, 2)
    scale_rows = torch.arange(chunks * num_scales, device=codes.device) * INPUTS // num_scales // weight.block
    stages = torch.empty(
        len(pairs), chunks, 2, CODE_BYTES + num_scales * SCALE_BYTES, dtype=torch.uint8, device=codes.device
    )
    for member in range(2):  # one after the other, which bounds the temporary memory
        stages[:, :, member, :CODE_BYTES] = codes[pairs[:, member]].flatten(2).view(torch.uint8)
        scales = words.view(len(words), tiles, TILE)[scale_rows][:, pairs[:, member]].view(chunks, num_scales, -1, TILE)
        stages[:, :, member, CODE_BYTES:] = scales.permute(2, 0, 1, 3).flatten(2).contiguous().view(torch.uint8)
    return stages


def fragment_order(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes in the order in which wgmma holds its operand A in registers.

    The operand of 64 outputs and 16 inputs is in 128 threads, in 4 registers of two inputs each. A chunk of 128 inputs has
    8 such operands. Four of them are in the same words, at different bits. So the order is words [half, thread, register].

    Args:
        codes: see `Int4Weight`, int16 [T, C, 64, 32].

    Returns:
        A new tensor of the same shape.
    """
    tiles, chunks = codes.shape[:2]
    # An output is 16 * warp + 8 * upper + row, and a word has the inputs from 2 * (8 * half + 4 * right + pair) on.
    words = codes.view(torch.int32).view(tiles, chunks, 4, 2, 8, 2, 2, 4)
    warp, upper, row, half, right, pair = range(2, 8)
    return words.permute(0, 1, half, warp, row, pair, right, upper).contiguous().view(torch.int16).view(codes.shape)


@triton.jit
def _dequantize_stages(stages, out, first, half, chunks, K, SCALES: tl.constexpr):
    """Dequantize a chunk of tile `first` + program to `out`.

    `half` is the number of gate tiles, whose stages also hold the up tiles. It is 0 if the weight is not gated; then a stage
    holds two neighbouring tiles.
    """
    tile, chunk = first + tl.program_id(0), tl.program_id(1)
    block = tl.where(half > 0, tile % tl.maximum(half, 1), tile // 2)
    member = tl.where(half > 0, tile // tl.maximum(half, 1), tile % 2)
    stage = stages + ((block.to(tl.int64) * chunks + chunk) * 2 + member) * (_CODE_BYTES + _SCALE_BYTES * SCALES)
    line, depth = tl.arange(0, 64), tl.arange(0, 32)
    word = depth // 2
    thread = (line // 16 * 32 + line % 8 * 4)[:, None] + (word % 4)[None, :]
    register = (line // 8 % 2)[:, None] + 2 * (word // 4 % 2)[None, :]
    index = (((word // 8)[None, :] * 128 + thread) * 4 + register) * 2 + (depth % 2)[None, :]
    packed = tl.load(stage.to(tl.pointer_type(tl.int16), bitcast=True) + index)
    scales = (stage + _CODE_BYTES).to(tl.pointer_type(tl.int32), bitcast=True)
    for i in tl.static_range(4):
        part = chunk * _INPUTS + i * 32
        to = (tl.program_id(0).to(tl.int64) * 64 + line)[:, None] * K + part + depth[None, :]
        values = dequantize_int4(packed, tl.load(scales + i * SCALES // 4 * 64 + line), i, out.dtype.element_ty)
        tl.store(out + to, values, mask=(part + depth < K)[None, :])


def dequantize_stages(stages: torch.Tensor, first: int, out: torch.Tensor, *, gated: bool) -> None:
    """Dequantize the tiles from `first` on.

    Args:
        stages: the result of `pack_stages`.
        first: first tile; all gate tiles come before all up tiles.
        out: [tiles * 64, K] in the model's dtype.
        gated: see `Int4Weight`.
    """
    blocks, chunks, _, size = stages.shape
    _dequantize_stages[(len(out) // TILE, chunks)](
        stages,
        out,
        first,
        blocks if gated else 0,
        chunks,
        out.shape[1],
        SCALES=(size - CODE_BYTES) // SCALE_BYTES,
        num_warps=4,
    )
