"""Tile sizes of the grouped GEMMs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile of a grouped GEMM.

    Attributes:
        cols: output columns per program (BLOCK_N).
        depth: elements of the inner dimension per iteration (BLOCK_K).
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int


def choose_block_size(num_rows: int, num_experts: int, *, is_packed: bool = False) -> int:
    """Return the rows per block (BLOCK_M): the first power of two from 16 on that is at least 1.5 times the mean rows per expert.

    It is at most 128. Tensor cores need at least 16 rows. `is_packed`: weights are bytes of two codes. For them, blocks of 16
    rows are faster up to a mean of 16 rows per expert.
    """
    block_size = 16
    if is_packed and num_rows <= block_size * num_experts:
        return block_size
    while block_size < 128 and 2 * block_size * num_experts < 3 * num_rows:
        block_size *= 2
    return block_size


def choose_tiles(num_rows: int, block_size: int, dtype: torch.dtype, large_memory: bool) -> tuple[Tiles, Tiles]:
    """Return the tiles of the gate-up GEMM and of the down GEMM.

    ``scripts/tune_moe.py`` found them to be the fastest on an H200, for 128 experts, intermediate size 768 and hidden size 2048.
    The tiles of packed weights were measured on an H100.

    Args:
        num_rows: total number of rows.
        block_size: rows per block.
        dtype: dtype of the weight tensor; uint8 for packed weights, bytes of two codes. `triton_grouped` sets the depth of their
            tiles to the largest of 128, 64 and 32 that divides the inputs per scale.
        large_memory: a program may use 200 KB of shared memory. If False, the tiles fit into 96 KB.
    """
    if dtype.itemsize > 2 or not large_memory:
        tiles = Tiles(64, 128 // dtype.itemsize, 8 if block_size == 128 else 4, 3)
        return tiles, tiles
    if block_size == 128:
        return Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3)
    if block_size == 64:
        return Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 4)
    if dtype == torch.uint8 or (block_size == 16 and num_rows <= 256):
        return Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3)
    return Tiles(64, 128, 4, 3), Tiles(128, 128, 4, 3)
