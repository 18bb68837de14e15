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
    """Rows in a block: about as many as an expert has, from the 16 that a tensor core takes at least up to 128."""
    block_size = 16
    while block_size < 128 and block_size * num_experts < num_rows:
        block_size *= 2
    return block_size


def choose_tiles(block_size: int, element_size: int) -> Tiles:
    """For blocks of this many rows of elements of this many bytes: a stage of the larger kernel's operands takes 32 KiB
    at most, three of which fit every NVIDIA GPU."""
    return Tiles(cols=64, depth=128 // element_size, num_warps=8 if block_size == 128 else 4, num_stages=3)
