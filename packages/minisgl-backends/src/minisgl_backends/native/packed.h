/* Layout of the packed codes and scales of quantized weights, in tiles of 16 rows and blocks of 32 columns.

   A tile has units of one block or, in K-quants, of a superblock of eight. A unit begins with a header: the float16 scales of its
   16 rows and, in some types, their float16 minima. Its blocks follow. In K-quants, a block begins with integer factors of the
   scales, [groups][16], and of the minima, [groups][16]. Each factor is a byte; in Q2_K, the two share a byte, with 4 bits each.
   The bit planes of the codes follow. A weight is scale * (code - zero), or scale * code + minimum. (ggml subtracts the minima of
   K-quants; here they are negated.)

   Planes are ordered from the highest bits to the lowest: 3 bits are 1 + 2, 5 are 1 + 4, and 6 are 2 + 4. So a block is read in
   ascending order, which hardware prefetchers follow. A plane is an array of 32-bit words [..][16 rows]. A byte has 8 / bits
   codes, the first in its lowest bits. Byte j of word i has those of columns 4k + j of its row, for 8 / bits consecutive k from
   i * 8 / bits on. In a plane of 4 bits, k is i and i + 4 instead. So a SIMD register of words, one per row, is multiplied by
   word k of x, which is broadcast to all lanes (VNNI's vpdpbusd). */
#pragma once
#include "common.h"

#define TILE 16  /* rows per tile */
#define BLOCK 32 /* columns per block */

/* GGML's types, with its numbers. Those from Q2_K on are K-quants. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14 };
#define TYPES(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K)

typedef struct {
    int bits, groups, zero, has_min; /* bits per code, groups of columns per block, zero point of the codes, and 1 with minima */
    int unit, file_bytes;            /* blocks per unit, and bytes of a unit of a row in the file */
} Format;
static const Format FORMATS[] = {
    [Q4_0] = {4, 1, 8, 0, 1, 18},   [Q4_1] = {4, 1, 0, 1, 1, 20},   [Q5_0] = {5, 1, 16, 0, 1, 22},
    [Q5_1] = {5, 1, 0, 1, 1, 24},   [Q8_0] = {8, 1, 0, 0, 1, 34},   [Q2_K] = {2, 2, 0, 1, 8, 84},
    [Q3_K] = {3, 2, 4, 0, 8, 110},  [Q4_K] = {4, 1, 0, 1, 8, 144},  [Q5_K] = {5, 1, 0, 1, 8, 176},
    [Q6_K] = {6, 2, 32, 0, 8, 210},
};

INLINE int64_t codes_bytes(int bits) { return bits * BLOCK / 8 * TILE; }
INLINE int64_t plane_of_4(int bits) { return codes_bytes(bits - 4); }
INLINE int64_t plane_of_2(int bits) { return bits == 3 ? codes_bytes(1) : 0; }
INLINE int64_t header_bytes(int type) { return 2 * TILE * (1 + FORMATS[type].has_min); }
INLINE int64_t factors_bytes(int type) {
    const int bytes = type < Q2_K ? 0 : type == Q2_K ? 1 : 1 + FORMATS[type].has_min;
    return TILE * FORMATS[type].groups * bytes;
}
INLINE int64_t block_bytes(int type) { return factors_bytes(type) + codes_bytes(FORMATS[type].bits); }
INLINE int64_t unit_bytes(int type) { return header_bytes(type) + FORMATS[type].unit * block_bytes(type); }
INLINE int64_t tile_bytes(int type, int64_t blocks) { return blocks / FORMATS[type].unit * unit_bytes(type); }

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
