"""Tilings of GEMMs of packed weights."""

from dataclasses import dataclass

import triton

from minisgl_backends.kernels.device import has_large_shared_memory
from minisgl_backends.kernels.packed_matrix import PackedMatrix

_SPLIT_K_LIMITS = {16: (1024, 16, 512), 32: (640, 8, 512), 64: (512, 4, 1024)}
"""Largest number of programs, of splits, and smallest number of inputs per split, by rows per program; tuned on an H200."""


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """Distribution of a GEMM over programs.

    Attributes:
        cols: outputs per program; gate and up outputs count once.
        rows: rows per program.
        splits: programs per block, each with a part of K.
        warps: warps per program.
        stages: stages of the software pipeline, Triton's ``num_stages``.
    """

    cols: int
    rows: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


def choose_tiling(num_rows: int, num_outputs: int, weight: PackedMatrix) -> PackedTiling:
    """Return a tiling for up to 64 rows, whose pipeline stages fit into shared memory; gate and up outputs count once."""
    blocks = triton.cdiv(num_outputs, 64)
    cols, rows = 64, max(16, triton.next_power_of_2(num_rows))
    most_programs, most_splits, fewest_inputs = _SPLIT_K_LIMITS[rows]
    splits = min(most_splits, max(1, round(most_programs / blocks)), max(1, weight.num_inputs // fewest_inputs))
    return PackedTiling(cols, rows, splits, stages=choose_stages(cols, rows, weight))


def choose_stages(cols: int, rows: int, weight: PackedMatrix) -> int:
    """Return how many pipeline stages of a program fit into shared memory, two or three; gate and up outputs count once."""
    packing = weight.packing
    shared = 220_000 if has_large_shared_memory(weight.codes.device) else 98_000
    # A stage is a chunk: 16-bit inputs for each row; for each output, the codes of both planes, words of scales and a superblock.
    bits = packing.low * packing.chunk + 16 * packing.sub * (packing.high > 0)
    scales = 4 * max(1, packing.chunk // packing.word) + 4 * packing.has_superblocks
    stage = 2 * packing.chunk * rows + cols * (1 + weight.gated) * (bits // 8 + scales)
    return max(2, min(3, shared // stage))
