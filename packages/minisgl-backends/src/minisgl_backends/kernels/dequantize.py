"""Weights of packed matrices in registers, from codes and scales; see `minisgl_backends.kernels.packed_matrix.Packing`.

A GEMM that reads few rows of activations is limited by these instructions as much as by memory, so they are written in PTX. A
code is put into the mantissa of a float, which needs no conversion: 128 + code in bfloat16, and 1024 + code in float16.
"""

import triton
import triton.language as tl

from minisgl_backends.kernels.fp8 import INTERPRETED

_SHIFTS = tl.constexpr(("0", "4", "8", "12"))


@triton.jit
def dequantize_int4(codes, words, PART: tl.constexpr, dtype: tl.constexpr):
    """Return ``(code - zero) * scale`` of the codes in bits 4 * PART to 4 * PART + 3, in `dtype`.

    A word has the scale and the zero as `minisgl_backends.kernels.int4_gemm.scale_words` packs them.
    Two codes are converted by four instructions. In bfloat16, addition and multiplication are fused multiply-adds with 1 and -0,
    since GPUs before Hopper have no other instruction for pairs.
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


def _unpacking(low: int, high: int, part: int) -> str:
    """Return the PTX that converts the codes of a part in two elements to ``128 + code`` in float32, in t and u.

    `Packing` describes parts. Codes of 8 bits do not fit below the 128, and become ``32768 + code``.
    """
    if low == 8:
        return "".join(f"prmt.b32 {to}, $1, 0x47000000, 0x74{part + at}4; " for to, at in (("t", 0), ("u", 2)))
    text = _masked("$1", low * (part % (16 // low)), 0, low, "0x43004300")
    if high:
        text += _masked("$2", high * part, low, high, "t")
    return text + "and.b32 u, t, 0xFFFF0000; shl.b32 t, t, 16; "


def _masked(source: str, first: int, to: int, bits: int, others: str) -> str:
    """Return the PTX that extracts `bits` bits from each half of register `source`, into register t.

    They begin at bit `first` of the half and move to bit `to`. The result is combined (OR) with `others`, a register or a mask.
    """
    target, shift = ("t", first - to) if source == "$1" else ("u", first - to)
    mask = ((1 << bits) - 1) << to
    return (
        f"{'shr' if shift >= 0 else 'shl'}.b32 {target}, {source}, {abs(shift)}; "
        f"lop3.b32 t, {target}, {mask | mask << 16:#x}, {others}, 0xEA; "
    )


_UNPACKING = tl.constexpr(
    {
        (low, high, part): _unpacking(low, high, part)
        for low, high in ((2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (8, 0))
        for part in range(16 // (high or low))
    }
)
_SCALING = tl.constexpr("fma.rn.f32 t, t, $3, $5; fma.rn.f32 u, u, $4, $6; ")


@triton.jit
def dequantize(
    codes, high, scale, offset, PART: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, dtype: tl.constexpr
):
    """Return ``code * scale + offset`` of the codes of part PART (see `Packing`), in float32 rounded to `dtype`.

    Args:
        codes, high: elements of the two planes, int16 [outputs, inputs]; `high` is not used if HIGH is 0.
        scale, offset: float32 [outputs], from `scale_and_offset`.
    """
    if INTERPRETED:
        code = (codes.to(tl.int32) >> (PART % (16 // LOW) * LOW)) & ((1 << LOW) - 1)
        if HIGH > 0:
            code |= ((high.to(tl.int32) >> (PART * HIGH)) & ((1 << HIGH) - 1)) << LOW
        out = (code.to(tl.float32) * scale[:, None] + offset[:, None]).to(dtype)
    elif dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; " + _UNPACKING[(LOW, HIGH, PART)] + _SCALING + "cvt.rn.bf16x2.f32 $0, u, t; }",
            "=r,r,r,r,r,r,r", [codes, high, scale[:, None], offset[:, None]], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; " + _UNPACKING[(LOW, HIGH, PART)] + _SCALING + "cvt.rn.f16x2.f32 $0, u, t; }",
            "=r,r,r,r,r,r,r", [codes, high, scale[:, None], offset[:, None]], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return out


@triton.jit
def _half(word, INDEX: tl.constexpr):
    """Return the float16 in the low (0) or high half (1) of a word, in float32."""
    return (word >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bits(word, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT bits of a word from bit FIRST on, in float32."""
    return ((word >> FIRST) & ((1 << COUNT) - 1)).to(tl.float32)


@triton.jit
def scale_and_offset(word, superblock, FIELD: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, ZERO: tl.constexpr):
    """Return field FIELD of a word of scales, float32, for `dequantize`.

    `dequantize` leaves `base` in each code, so the offset includes ``-base * scale``. All products are exact. Only the sum with
    a stored offset is rounded to float32, by at most 2**-24 of it, which is about 2**-17 of the scale.
    """
    base: tl.constexpr = 0.0 if INTERPRETED else (32768.0 if LOW == 8 else 128.0)
    if KIND == "scale":
        scale = _half(word, FIELD)
        offset = scale * -(base + ZERO)
    elif KIND == "pair":
        scale = _half(word, 0)
        offset = tl.fma(scale, -base, _half(word, 1))
    elif KIND == "bytes":
        scale = ((word << (24 - 8 * FIELD)) >> 24).to(tl.float32) * _half(superblock, 0)
        offset = scale * -(base + ZERO)
    elif KIND == "byte_pairs":
        scale = _bits(word, 16 * FIELD, 8) * _half(superblock, 0)
        offset = tl.fma(scale, -base, _bits(word, 16 * FIELD + 8, 8) * _half(superblock, 1))
    else:
        scale = _bits(word, 8 * FIELD, 4) * _half(superblock, 0)
        offset = tl.fma(scale, -base, _bits(word, 8 * FIELD + 4, 4) * _half(superblock, 1))
    return scale, offset
