/* Layout of packed weights, in tiles of 16 rows and blocks of 32 columns.

   A block of a tile has the bit planes of its codes, [groups][16] scales and, in some layouts, [groups][16] minima, both float16.
   A weight is scale * (code - zero), or scale * code + minimum. (ggml subtracts the minima of K-quants; here they are negated.)

   Planes are ordered from the lowest bits to the highest: 2 bits are 2, 3 are 2 + 1, 5 are 4 + 1, and 6 are 4 + 2. A plane is an
   array of 32-bit words [..][16 rows]. Byte j of a word has columns 4k + j of its row, so that a SIMD register of words, one per
   row, is multiplied by word k of x, broadcast to all lanes (VNNI's vpdpbusd). */
#pragma once
#include "common.h"

#define TILE 16  /* rows per tile */
#define BLOCK 32 /* columns per block */

/* X(name, bits per code, groups of columns per block, zero, has minima). The order is that of LAYOUTS in gguf_types.py. */
#define LAYOUTS(X) \
    X(U4, 4, 1, 8, 0) X(U4M, 4, 1, 0, 1) X(U5, 5, 1, 16, 0) X(U5M, 5, 1, 0, 1) X(S8, 8, 1, 0, 0) X(U6, 6, 2, 32, 0) \
    X(U2M, 2, 2, 0, 1) X(U3, 3, 2, 4, 0)
enum {
#define X(name, ...) name,
    LAYOUTS(X)
#undef X
};

INLINE int64_t codes_bytes(int bits) { return bits * BLOCK / 8 * TILE; }
INLINE int64_t block_bytes(int bits, int groups, int has_min) { return codes_bytes(bits) + 2 * TILE * groups * (1 + has_min); }
INLINE int64_t plane_of_2(int bits) { return bits == 6 ? codes_bytes(4) : 0; }
INLINE int64_t plane_of_1(int bits) { return codes_bytes(bits - 1); }

/* Float16 and float32, also without the processor's conversions; to nearest, ties to even. */
INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    if (magnitude < 0x0400) return (sign ? -1.0f : 1.0f) * (float)magnitude * 0x1p-24f;
    bits = sign | (magnitude >= 0x7c00 ? 0x7f800000 | (magnitude & 0x3ff) << 13 : (magnitude << 13) + 0x38000000);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (bits >> 16) & 0x8000;
    float size = fabsf(value);
    if (value != value) return 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint16_t)nearbyintf(size * 0x1p24f);
    bits &= 0x7fffffff;
    return sign | (uint16_t)((bits + 0xfff + ((bits >> 13) & 1) - 0x38000000) >> 13);
}
