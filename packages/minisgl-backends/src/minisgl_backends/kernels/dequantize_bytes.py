"""Weights from bytes that have the 4-bit codes of two consecutive inputs each, as packed experts have.

PTX converts the codes of four bytes to bfloat16 or float16 by 18 instructions if they are integers. Floats (MXFP4) take 28, to
bfloat16. With conversions of integers to floats instead, the MXFP4 experts of a layer took 746 instead of 305 µs: 256 tokens on
one H100, see docs/performance-notes.md. See `minisgl_backends.kernels.dequantize`, too.
"""

import triton
import triton.language as tl

from minisgl_backends.kernels.fp8 import INTERPRETED


def _unpacking(low: str, high: str, scaling: str) -> str:
    """Return the PTX that dequantizes four bytes, $4: their low codes to $0 and $1, their high codes to $2 and $3.

    `low` and `high` extract codes from {x}, which has a byte in each half, to {to}. `scaling` applies offset and scale to them.
    Scales are $5 and $6, offsets $7 and $8.
    """
    text = "{ .reg .b32 t, u, v, one, nil; mov.b32 one, 0x3F803F80; mov.b32 nil, 0x80008000; "
    text += "prmt.b32 t, $4, 0, 0x4140; prmt.b32 u, $4, 0, 0x4342; "
    for index, codes in enumerate((low, low, high, high)):
        half = index % 2
        names = {"to": f"${index}", "x": "tu"[half], "scale": f"${5 + half}", "offset": f"${7 + half}"}
        text += (codes + scaling).format_map(names)
    return text + "}"


def _unpacking_int4(magic: str, scaling: str) -> str:
    """Return the PTX for integers, which become the last mantissa bits of `magic`. The offset subtracts it and the zero point."""
    text = f"lop3.b32 {{to}}, {{from}}, 0x000F000F, {magic}, 0xEA; "
    return _unpacking(text.replace("from", "x"), "shr.b32 v, {x}, 4; " + text.replace("{from}", "v"), scaling)


def _mxfp4(first: int) -> str:
    """Return the PTX that moves codes at bit `first` to bfloat16's sign, lowest two exponent bits and highest mantissa bit."""
    return (
        f"shl.b32 v, {{x}}, {12 - first}; and.b32 v, v, 0x80008000; shl.b32 {{to}}, {{x}}, {6 - first};"
        " lop3.b32 {to}, {to}, 0x01C001C0, v, 0xEA; "
    )


# For pairs of bfloat16, GPUs before Hopper have fused multiply-adds only.
_BF16_INT4 = tl.constexpr(
    _unpacking_int4("0x43004300", "fma.rn.bf16x2 {to}, {to}, one, {offset}; fma.rn.bf16x2 {to}, {to}, {scale}, nil; ")
)
_FP16_INT4 = tl.constexpr(
    _unpacking_int4("0x64006400", "add.rn.f16x2 {to}, {to}, {offset}; mul.rn.f16x2 {to}, {to}, {scale}; ")
)
# The offset is a factor here, 2**126, which corrects the exponent's bias.
_BF16_MXFP4 = tl.constexpr(
    _unpacking(
        _mxfp4(0), _mxfp4(4), "fma.rn.bf16x2 {to}, {to}, {offset}, nil; fma.rn.bf16x2 {to}, {to}, {scale}, nil; "
    )
)


@triton.jit
def dequantize_int4_bytes(packed, scale, zero, dtype: tl.constexpr):
    """Return ``(code - zero) * scale``, [rows, 2 * bytes] in `dtype`.

    Args:
        packed: uint8 [rows, bytes].
        scale: [rows], in `dtype`.
        zero: float32 [rows], integers up to 128.
    """
    if INTERPRETED or dtype == tl.float32:
        code = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
        out = ((code - zero[:, None]) * scale.to(tl.float32)[:, None]).to(dtype)
    elif dtype == tl.bfloat16:
        out = _convert(packed, scale, (-128.0 - zero).to(dtype), _BF16_INT4, tl.bfloat16)
    else:
        out = _convert(packed, scale, (-1024.0 - zero).to(dtype), _FP16_INT4, tl.float16)
    return out


@triton.jit
def dequantize_mxfp4_bytes(packed, exponent, dtype: tl.constexpr):
    """Return floats of OCP's format e2m1 times ``2 ** (exponent - 127)``, [rows, 2 * bytes] in `dtype`.

    Args:
        packed: uint8 [rows, bytes].
        exponent: e8m0, uint8 [rows].
    """
    bits = exponent.to(tl.int32)
    # 2^-127 is subnormal; 255 is NaN
    bits = tl.where(bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23))
    scale = bits.to(tl.float32, bitcast=True)
    if INTERPRETED or dtype != tl.bfloat16:
        code = tl.interleave(packed & 15, packed >> 4).to(tl.int32)
        power = (code >> 1) & 3
        size = tl.where(power == 0, (code & 1) * 0.5, (2 + (code & 1)) * (1 << power) * 0.25)
        out = (tl.where(code > 7, -size, size) * scale[:, None]).to(dtype)
    else:
        out = _convert(packed, scale.to(dtype), tl.full(exponent.shape, 2.0**126, dtype), _BF16_MXFP4, tl.bfloat16)
    return out


@triton.jit
def _convert(packed, scale, offset, PTX: tl.constexpr, dtype: tl.constexpr):
    low, high = tl.inline_asm_elementwise(
        PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [packed, scale[:, None], offset[:, None]],
        dtype=(dtype.value, dtype.value), is_pure=True, pack=4,
    )  # fmt: skip
    return tl.interleave(low, high)
