"""Dequantization of 4-bit codes in registers, for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backends.kernels.fp8 import INTERPRETED

_SHIFTS = tl.constexpr(("0", "4", "8", "12"))


@triton.jit
def dequantize(codes, words, PART: tl.constexpr, dtype: tl.constexpr):
    """Return ``(code - zero) * scale`` of the codes in bits 4 * PART to 4 * PART + 3, in `dtype`; see `int4_gemm.scale_words`.

    A code in the last bits of a 16-bit float's mantissa is 128 + code in bfloat16, and 1024 + code in float16. Two codes are
    converted by four instructions. GPUs before Hopper have only the fused multiply-add in bfloat16.
    """
    scale = words.to(tl.int16).to(dtype, bitcast=True)[:, None]
    offset = (words >> 16).to(tl.int16).to(dtype, bitcast=True)[:, None]
    if INTERPRETED:
        code = ((codes.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32)
        code += offset.to(tl.float32) + (128.0 if dtype == tl.bfloat16 else 1024.0)
        out = (code * scale.to(tl.float32)).to(dtype)
    elif dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t, one, nil; mov.b32 one, 0x3F803F80; mov.b32 nil, 0x80008000; shr.b32 t, $1, "
            + _SHIFTS[PART]
            + "; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 t, t, one, $3;"
            " fma.rn.bf16x2 $0, t, $2, nil; }",
            "=r,r,r,r", [codes, scale, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, "
            + _SHIFTS[PART]
            + "; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 t, t, $3; mul.rn.f16x2 $0, t, $2; }",
            "=r,r,r,r", [codes, scale, offset], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return out
