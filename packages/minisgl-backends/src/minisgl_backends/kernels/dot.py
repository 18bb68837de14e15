"""`tl.dot` with float32 accumulation and no TF32."""

import triton
import triton.language as tl


@triton.jit
def add_dot(total, left, right, WIDEN: tl.constexpr):
    """Return ``total + left @ right`` in float32. WIDEN is for Triton's interpreter, which multiplies bfloat16 as integers."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")  # not TF32
