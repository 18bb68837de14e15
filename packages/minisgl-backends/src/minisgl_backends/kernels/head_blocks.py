"""Column blocks of attention heads, since the sizes of Triton's tiles are powers of two.

The first D_BLOCK columns of a head are one block. If D is not a power of two, the others are a second block of REST columns. So a
head of 192 is 128 + 64 columns, without padding.
"""

import triton
import triton.language as tl

_MIN_REST, _MIN_REST_FP8 = 32, 64
"""Smallest second blocks. With 16 columns, decode attention of heads of 80 takes all 255 registers per thread; with 32, it takes
156 (9.0, bfloat16). With an FP8 pool and 16 or 32 columns, prefill attention has wrong results on Hopper (Triton 3.6)."""


def head_blocks(dim: int, *, is_fp8: bool) -> tuple[int, int]:
    """Return D_BLOCK, the largest power of two up to `dim`, and REST, the size of the second block; 0 if there is none.

    `is_fp8` is True for an FP8 pool.
    """
    first = 1 << (dim.bit_length() - 1)
    rest = dim - first
    return first, min(max(triton.next_power_of_2(rest), _MIN_REST_FP8 if is_fp8 else _MIN_REST), first) if rest else 0


@triton.jit
def column_mask(rows, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mask of a block of BLOCK columns from FIRST on: `rows` [rows, 1], unless the block ends after the head."""
    if FIRST + BLOCK > D:
        rows = rows & (FIRST + tl.arange(0, BLOCK) < D)[None, :]
    return rows
