"""Conversions to and from float8_e4m3fn, for other kernels."""

import triton
import triton.language as tl

from minisgl_backends.requirements import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
"""True if Triton's interpreter runs the kernels. Triton decides this when it is imported, so later changes have no effect."""


@triton.jit
def to_fp8(x):
    """Round float32 x to float8_e4m3fn, to nearest with ties to even; the conversion saturates."""
    x = tl.clamp(x, -448.0, 448.0)
    if INTERPRETED:  # the interpreter's cast drops the carry of rounding, and subnormal numbers
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three mantissa bits remain
        small = x + 24576.0 - 24576.0  # a multiple of 2^-9
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def to_pool_dtype(x, scale, pool):
    """Convert x to the dtype of a KV pool; an FP8 pool holds ``x / scale``."""
    if pool.dtype.element_ty == tl.float8e4nv:
        return to_fp8(x.to(tl.float32) / scale)
    return x.to(pool.dtype.element_ty)


@triton.jit
def to_dot_dtype(q, q_rest, scale, pages, REST: tl.constexpr):
    """Convert both column blocks of queries to the dtype of the QK dot product, and return them with the scale of the scores.

    With an FP8 pool, bfloat16 queries become float16 in [-1, 1]. Converting two float8 numbers to float16 is one instruction,
    converting them to bfloat16 is five. If REST is 0, `q_rest` is not used; see `minisgl_backends.kernels.head_blocks`.
    """
    if pages.dtype.element_ty == tl.float8e4nv:  # noqa: SIM102 (a joined condition is not evaluated at compile time)
        if q.dtype == tl.bfloat16:
            largest = tl.maximum(tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0), 1e-30)
            if REST > 0:
                largest = tl.maximum(largest, tl.max(tl.max(tl.abs(q_rest.to(tl.float32)), 1), 0))
                q_rest = (q_rest.to(tl.float32) / largest).to(tl.float16)
            q = (q.to(tl.float32) / largest).to(tl.float16)
            scale = scale * largest
    return q, q_rest, scale


@triton.jit
def unpack_fp8_pairs(pairs):
    """Unpack pairs of float8 numbers, each pair in an int16, to the first and the second numbers in float16."""
    if INTERPRETED:
        first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        first = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $1, 0, 0x4420; mov.b32 {low, high}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, low; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        second = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $1, 0, 0x4431; mov.b32 {low, high}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, low; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return first, second
