"""Conversions to float8_e4m3fn and back, for other kernels."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether Triton's interpreter runs the kernels, as Triton decides when they are imported."""


@triton.jit
def to_fp8(x):
    """Float32 x to the nearest float8, even ones where two are as near; what is too large becomes the largest number."""
    x = tl.clamp(x, -448.0, 448.0)
    if INTERPRETED:  # its cast forgets what rounding carries, and numbers below the smallest normal one
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of mantissa are left
        small = x + 24576.0 - 24576.0  # a multiple of 2^-9
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def as_stored(x, scale, pool):
    """x as a KV pool holds it, which is divided by a scale where that is fp8."""
    if pool.dtype.element_ty == tl.float8e4nv:
        return to_fp8(x.to(tl.float32) / scale)
    return x.to(pool.dtype.element_ty)


@triton.jit
def as_multiplied(q, scale, pages):
    """Queries in the type of their products, and the scale of these. For an fp8 pool, bfloat16 becomes float16 below 1 in size.

    To turn float8 into float16 is one instruction for two numbers; into bfloat16, it is five.
    """
    if pages.dtype.element_ty == tl.float8e4nv:  # noqa: SIM102 (joined, Triton would not decide it when it compiles)
        if q.dtype == tl.bfloat16:
            largest = tl.maximum(tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0), 1e-30)
            q = (q.to(tl.float32) / largest).to(tl.float16)
            scale = scale * largest
    return q, scale


@triton.jit
def halves_of_pairs(pairs):
    """Pairs of float8 numbers, each pair in an int16, to the first numbers and the second ones, in float16."""
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
