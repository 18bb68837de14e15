"""How the grouped matrix products are cut: rows of a block, and the other sizes of a tile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a grouped product is cut.

    Attributes:
        cols: columns of the output a program computes.
        depth: elements of the inner dimension a step takes.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int


def choose_block_size(num_rows: int, num_experts: int) -> int:
    """Rows in a block: half as many again as an expert has, from the 16 that a tensor core takes at least up to 128."""
    block_size = 16
    while block_size < 128 and 2 * block_size * num_experts < 3 * num_rows:
        block_size *= 2
    return block_size


def choose_tiles(num_rows: int, block_size: int, element_size: int, large_memory: bool) -> tuple[Tiles, Tiles]:
    """For both products; the fastest of ``scripts/tune_moe.py`` on an H200, for 128 experts of 768 and a hidden size of 2048.

    Args:
        num_rows: rows in all.
        block_size: of them, in a block.
        element_size: bytes.
        large_memory: whether a program can have 200 KB of shared memory; else tiles are such that 96 KB will do.
    """
    if element_size > 2 or not large_memory:
        tiles = Tiles(64, 128 // element_size, 8 if block_size == 128 else 4, 3)
        return tiles, tiles
    if block_size == 128:
        return Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3)
    if block_size == 64:
        return Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 4)
    if block_size == 16 and num_rows <= 256:
        return Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3)
    return Tiles(64, 128, 4, 3), Tiles(128, 128, 4, 3)
