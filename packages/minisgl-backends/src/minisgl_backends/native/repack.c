/* Repack blocks of GGUF files into the layout of packed.h, and dequantize rows of packed matrices.

   The file's formats are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A superblock has 256
   columns, which are eight blocks here. */
#include "packed.h"

typedef struct {
    uint8_t codes[BLOCK];
    uint16_t scale, min;              /* float16, of the unit */
    uint8_t factors[2], min_factors[2]; /* integers of the block's groups by which K-quants multiply them */
} Unpacked;

INLINE uint16_t half_at(const uint8_t *bytes) { return (uint16_t)(bytes[0] | bytes[1] << 8); }
INLINE uint16_t negated_half_at(const uint8_t *bytes) { return half_at(bytes) ^ 0x8000; }

INLINE void nibbles(uint8_t *codes, const uint8_t *bytes) {
    for (int i = 0; i < 16; i++) codes[i] = bytes[i] & 15, codes[16 + i] = bytes[i] >> 4;
}

INLINE void fifth_bits(uint8_t *codes, const uint8_t *bytes) {
    for (int i = 0; i < BLOCK; i++) codes[i] |= (bytes[i / 8] >> (i % 8) & 1) << 4;
}

/* Scales and minima of Q4_K and Q5_K; those of block `b` have 6 bits each. */
INLINE void k_scales(Unpacked *to, const uint8_t *unit, int b) {
    const uint8_t *s = unit + 4;
    to->scale = half_at(unit), to->min = negated_half_at(unit + 2);
    to->factors[0] = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6) << 4;
    to->min_factors[0] = b < 4 ? s[b + 4] & 63 : s[b + 4] >> 4 | (s[b] >> 6) << 4;
}

/* Factor of the scale of group `i` of 16 in a superblock of Q3_K: 6 bits, minus 32. */
INLINE int q3_scale(const uint8_t *s, int i) {
    int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
    return (low | (s[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32;
}

/* Unpack block `b` of a unit of the file. */
static void unpack_file_block(Unpacked *to, int type, const uint8_t *unit, int b) {
    uint8_t *codes = to->codes;
    int half = b / 4, shift = b % 4 * 2;
    to->scale = half_at(unit), to->min = half_at(unit + 2);
    switch (type) {
        case Q4_0: nibbles(codes, unit + 2); break;
        case Q4_1: nibbles(codes, unit + 4); break;
        case Q5_0: nibbles(codes, unit + 6), fifth_bits(codes, unit + 2); break;
        case Q5_1: nibbles(codes, unit + 8), fifth_bits(codes, unit + 4); break;
        case Q8_0: memcpy(codes, unit + 2, BLOCK); break;
        case Q2_K:
            for (int i = 0; i < BLOCK; i++) codes[i] = unit[16 + half * 32 + i] >> shift & 3;
            to->scale = half_at(unit + 80), to->min = negated_half_at(unit + 82);
            memcpy(to->factors, unit + 2 * b, 2);
            break;
        case Q3_K:
            for (int i = 0; i < BLOCK; i++) codes[i] = (unit[32 + half * 32 + i] >> shift & 3) | (unit[i] >> b & 1) << 2;
            to->scale = half_at(unit + 108);
            for (int g = 0; g < 2; g++) to->factors[g] = q3_scale(unit + 96, 2 * b + g);
            break;
        case Q4_K:
            for (int i = 0; i < BLOCK; i++) codes[i] = unit[16 + b / 2 * 32 + i] >> (b % 2 * 4) & 15;
            k_scales(to, unit, b);
            break;
        case Q5_K:
            for (int i = 0; i < BLOCK; i++)
                codes[i] = (unit[48 + b / 2 * 32 + i] >> (b % 2 * 4) & 15) | (unit[16 + i] >> b & 1) << 4;
            k_scales(to, unit, b);
            break;
        case Q6_K:
            for (int i = 0; i < BLOCK; i++) {
                int low = unit[half * 64 + b % 2 * 32 + i] >> (b % 4 / 2 * 4) & 15;
                codes[i] = low | (unit[128 + half * 32 + i] >> shift & 3) << 4;
            }
            to->scale = half_at(unit + 208);
            memcpy(to->factors, unit + 192 + 2 * b, 2);
            break;
    }
}

/* Store a code in a plane of 1, 2 or 8 bits, which is zero at first. */
INLINE void put_code(uint8_t *plane, int bits, int row, int column, int code) {
    int k = column / 4, per_byte = 8 / bits, at = ((k / per_byte * TILE + row) * 4) + column % 4;
    plane[at] |= code << (k % per_byte * bits);
}

/* In the plane of 4 bits, the low half of a byte has column c, and the high half column 16 + c. */
INLINE void put_nibble(uint8_t *plane, int row, int column, int code) {
    plane[(column % 16 / 4 * TILE + row) * 4 + column % 4] |= code << (column / 16 * 4);
}

/* Pack the row's part of a block, and of the header of its unit. */
INLINE void pack_row(uint8_t *header, uint8_t *block, const Unpacked *from, int row, int type) {
    const int bits = FORMATS[type].bits, groups = FORMATS[type].groups, has_min = FORMATS[type].has_min;
    uint16_t *scales = (uint16_t *)header;
    scales[row] = from->scale;
    if (has_min) scales[TILE + row] = from->min;
    uint8_t *planes = block + factors_bytes(type);
    for (int c = 0; c < BLOCK; c++) {
        int code = from->codes[c];
        if (bits == 8) put_code(planes, 8, row, c, code);
        if (bits >= 4 && bits < 8) put_nibble(planes + plane_of_4(bits), row, c, code & 15);
        if (bits == 6) put_code(planes + plane_of_2(bits), 2, row, c, code >> 4);
        if (bits < 4) put_code(planes + plane_of_2(bits), 2, row, c, code & 3);
        if (bits == 5 || bits == 3) put_code(planes, 1, row, c, code >> (bits - 1));
    }
    for (int g = 0; g < groups && type >= Q2_K; g++) {
        block[g * TILE + row] = from->factors[g];
        if (has_min && type != Q2_K) block[(groups + g) * TILE + row] = from->min_factors[g];
    }
}

INLINE void repack_row(uint8_t *tile, const uint8_t *file, int row, int64_t blocks, int type) {
    const int unit = FORMATS[type].unit;
    for (int64_t b = 0; b < blocks; b++) {
        Unpacked unpacked;
        uint8_t *header = tile + b / unit * unit_bytes(type);
        unpack_file_block(&unpacked, type, file + b / unit * FORMATS[type].file_bytes, b % unit);
        pack_row(header, header + header_bytes(type) + b % unit * block_bytes(type), &unpacked, row, type);
    }
}

/* Repack rows of a GGUF file to packed [ceil(rows / 16)] tiles, which must be zeroed. */
void repack(uint8_t *packed, const uint8_t *file, int64_t type, int64_t rows, int64_t blocks) {
    const int64_t row_bytes = blocks / FORMATS[type].unit * FORMATS[type].file_bytes;
#pragma omp parallel for
    for (int64_t tile = 0; tile < (rows + TILE - 1) / TILE; tile++)
        for (int64_t row = tile * TILE; row < rows && row < (tile + 1) * TILE; row++)
            switch (type) {
#define X(name) \
    case name: repack_row(packed + tile * tile_bytes(name, blocks), file + row * row_bytes, row % TILE, blocks, name); break;
                TYPES(X)
#undef X
            }
}

/* Code of column `c` of a row in the planes of a block; signed if it has 8 bits. */
INLINE int code_at(const uint8_t *block, int bits, int row, int c) {
    int k = c / 4, j = c % 4, code = 0;
    if (bits == 8) return (int8_t)block[(k * TILE + row) * 4 + j];
    if (bits >= 4) code = block[plane_of_4(bits) + (c % 16 / 4 * TILE + row) * 4 + j] >> (c / 16 * 4) & 15;
    if (bits == 6 || bits < 4) {
        int pair = block[plane_of_2(bits) + (k / 4 * TILE + row) * 4 + j] >> (k % 4 * 2) & 3;
        code |= bits == 6 ? pair << 4 : pair;
    }
    if (bits == 5 || bits == 3) code |= (block[row * 4 + j] >> k & 1) << (bits - 1);
    return code;
}

INLINE void dequantize_row(T *out, const uint8_t *tile, int row, int64_t blocks, int type) {
    const int bits = FORMATS[type].bits, groups = FORMATS[type].groups, has_min = FORMATS[type].has_min;
    const int unit = FORMATS[type].unit;
    for (int64_t b = 0; b < blocks; b++, out += BLOCK) {
        const uint8_t *header = tile + b / unit * unit_bytes(type), *block = header + header_bytes(type) + b % unit * block_bytes(type);
        const uint16_t *scales = (const uint16_t *)header;
        for (int c = 0; c < BLOCK; c++) {
            const uint8_t *factor = block + c * groups / BLOCK * TILE + row;
            float scale = half_to_float(scales[row]), min = has_min ? half_to_float(scales[TILE + row]) : 0;
            if (type == Q2_K) scale *= *factor & 15, min *= *factor >> 4;
            else if (type > Q2_K) scale *= (int8_t)*factor, min *= has_min ? factor[groups * TILE] : 0;
            out[c] = from_float(scale * (code_at(block + factors_bytes(type), bits, row, c) - FORMATS[type].zero) + min);
        }
    }
}

/* out [count, 32 * blocks] = rows `ids` of the packed matrix with `rows`; NaN for other ids. */
void dequantize_rows(T *out, const uint8_t *packed, const int64_t *ids, int64_t type, int64_t count, int64_t rows, int64_t blocks) {
#pragma omp parallel for if (count * blocks * BLOCK > PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) {
        T *to = out + i * blocks * BLOCK;
        if (ids[i] < 0 || ids[i] >= rows) {
            for (int64_t c = 0; c < blocks * BLOCK; c++) to[c] = from_float(NAN);
            continue;
        }
        switch (type) {
#define X(name) \
    case name: dequantize_row(to, packed + ids[i] / TILE * tile_bytes(name, blocks), ids[i] % TILE, blocks, name); break;
            TYPES(X)
#undef X
        }
    }
}
