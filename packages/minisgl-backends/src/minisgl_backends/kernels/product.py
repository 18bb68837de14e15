"""The product of two tiles, where float32 means float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_product(total, left, right, WIDEN: tl.constexpr):
    """``total + left @ right`` in float32. WIDEN for Triton's interpreter, which multiplies bfloat16 as if it were integers."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")  # not TF32
