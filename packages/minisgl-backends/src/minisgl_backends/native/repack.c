/* Repack blocks of GGUF files into the layout of packed.h, and dequantize rows of packed matrices.

   The file's formats are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A superblock has 256
   columns, which are eight blocks here. */
#include "packed.h"

/* GGML's numbers of its types. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

typedef struct {
    uint8_t codes[BLOCK];
    uint16_t scales[2], mins[2];
} Unpacked;

INLINE uint16_t half_at(const uint8_t *bytes) { return (uint16_t)(bytes[0] | bytes[1] << 8); }
INLINE uint16_t scaled(const uint8_t *half, int factor) { return float_to_half(half_to_float(half_at(half)) * factor); }

INLINE void nibbles(uint8_t *codes, const uint8_t *bytes) {
    for (int i = 0; i < 16; i++) codes[i] = bytes[i] & 15, codes[16 + i] = bytes[i] >> 4;
}

INLINE void fifth_bits(uint8_t *codes, const uint8_t *bytes) {
    for (int i = 0; i < BLOCK; i++) codes[i] |= (bytes[i / 8] >> (i % 8) & 1) << 4;
}

/* Scale and minimum `b` of Q4_K and Q5_K, 6 bits each. */
INLINE void k_scales(Unpacked *to, const uint8_t *block, int b) {
    const uint8_t *s = block + 4;
    int scale = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6) << 4;
    int min = b < 4 ? s[b + 4] & 63 : s[b + 4] >> 4 | (s[b] >> 6) << 4;
    to->scales[0] = scaled(block, scale), to->mins[0] = scaled(block + 2, -min);
}

INLINE int q3_scale(const uint8_t *s, int i) {
    int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
    return (low | (s[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32;
}

/* Unpack 32 columns. `block` is the start of the file's block, and `b` counts the 32 columns within a superblock. */
static void unpack_file_block(Unpacked *to, int type, const uint8_t *block, int b) {
    uint8_t *codes = to->codes;
    int half = b / 4, shift = b % 4 * 2;
    to->scales[0] = half_at(block), to->mins[0] = half_at(block + 2);
    switch (type) {
        case Q4_0: nibbles(codes, block + 2); break;
        case Q4_1: nibbles(codes, block + 4); break;
        case Q5_0: nibbles(codes, block + 6), fifth_bits(codes, block + 2); break;
        case Q5_1: nibbles(codes, block + 8), fifth_bits(codes, block + 4); break;
        case Q8_0: memcpy(codes, block + 2, BLOCK); break;
        case Q2_K:
            for (int i = 0; i < BLOCK; i++) codes[i] = block[16 + half * 32 + i] >> shift & 3;
            for (int g = 0; g < 2; g++) {
                to->scales[g] = scaled(block + 80, block[2 * b + g] & 15);
                to->mins[g] = scaled(block + 82, -(block[2 * b + g] >> 4));
            }
            break;
        case Q3_K:
            for (int i = 0; i < BLOCK; i++)
                codes[i] = (block[32 + half * 32 + i] >> shift & 3) | (block[i] >> b & 1) << 2;
            for (int g = 0; g < 2; g++) to->scales[g] = scaled(block + 108, q3_scale(block + 96, 2 * b + g));
            break;
        case Q4_K:
            for (int i = 0; i < BLOCK; i++) codes[i] = block[16 + b / 2 * 32 + i] >> (b % 2 * 4) & 15;
            k_scales(to, block, b);
            break;
        case Q5_K:
            for (int i = 0; i < BLOCK; i++)
                codes[i] = (block[48 + b / 2 * 32 + i] >> (b % 2 * 4) & 15) | (block[16 + i] >> b & 1) << 4;
            k_scales(to, block, b);
            break;
        case Q6_K:
            for (int i = 0; i < BLOCK; i++) {
                int low = block[half * 64 + b % 2 * 32 + i] >> (b % 4 / 2 * 4) & 15;
                codes[i] = low | (block[128 + half * 32 + i] >> shift & 3) << 4;
            }
            for (int g = 0; g < 2; g++) to->scales[g] = scaled(block + 208, (int8_t)block[192 + half * 8 + b % 4 * 2 + g]);
            break;
    }
}

INLINE void put(uint8_t *plane, int bits, int row, int column, int code) {
    int k = column / 4, per_byte = 8 / bits, at = ((k / per_byte * TILE + row) * 4) + column % 4;
    plane[at] |= code << (k % per_byte * bits);
}

/* In the plane of 4 bits, the low half of a byte has column c, and the high half column 16 + c. */
INLINE void put_nibble(uint8_t *plane, int row, int column, int code) {
    plane[(column % 16 / 4 * TILE + row) * 4 + column % 4] |= code << (column / 16 * 4);
}

INLINE void pack_row(uint8_t *block, const Unpacked *from, int row, int bits, int groups, int has_min) {
    for (int c = 0; c < BLOCK; c++) {
        int code = from->codes[c];
        if (bits == 8) put(block, 8, row, c, code);
        if (bits >= 4 && bits < 8) put_nibble(block, row, c, code & 15);
        if (bits == 6) put(block + plane_of_2(bits), 2, row, c, code >> 4);
        if (bits < 4) put(block + plane_of_2(bits), 2, row, c, code & 3);
        if (bits == 5 || bits == 3) put(block + plane_of_1(bits), 1, row, c, code >> (bits - 1));
    }
    uint16_t *scales = (uint16_t *)(block + codes_bytes(bits));
    for (int g = 0; g < groups; g++) {
        scales[g * TILE + row] = from->scales[g];
        if (has_min) scales[(groups + g) * TILE + row] = from->mins[g];
    }
}

/* Repack rows of a GGUF file to packed [ceil(rows / 16)][blocks], which must be zeroed. A row has `row_bytes`; a block of the file
   has `type_bytes`, and `per_block` blocks of 32 columns: 1, or 8 in a superblock. */
void repack(uint8_t *packed, const uint8_t *file, int64_t type, int64_t layout, int64_t rows, int64_t blocks,
            int64_t row_bytes, int64_t type_bytes, int64_t per_block) {
#pragma omp parallel for
    for (int64_t tile = 0; tile < (rows + TILE - 1) / TILE; tile++)
        for (int64_t row = tile * TILE; row < rows && row < (tile + 1) * TILE; row++)
            for (int64_t b = 0; b < blocks; b++) {
                Unpacked unpacked;
                unpack_file_block(&unpacked, (int)type, file + row * row_bytes + b / per_block * type_bytes, b % per_block);
                switch (layout) {
#define X(name, bits, groups, zero, has_min) \
    case name: pack_row(packed + (tile * blocks + b) * block_bytes(bits, groups, has_min), &unpacked, row % TILE, bits, groups, has_min); break;
                    LAYOUTS(X)
#undef X
                }
            }
}

INLINE int code_at(const uint8_t *block, int bits, int row, int c) {
    int k = c / 4, j = c % 4, code = 0;
    if (bits == 8) return (int8_t)block[(k * TILE + row) * 4 + j];
    if (bits >= 4) code = block[(c % 16 / 4 * TILE + row) * 4 + j] >> (c / 16 * 4) & 15;
    if (bits == 6 || bits < 4) {
        int pair = block[plane_of_2(bits) + (k / 4 * TILE + row) * 4 + j] >> (k % 4 * 2) & 3;
        code |= bits == 6 ? pair << 4 : pair;
    }
    if (bits == 5 || bits == 3) code |= (block[plane_of_1(bits) + row * 4 + j] >> k & 1) << (bits - 1);
    return code;
}

INLINE void dequantize_row(T *out, const uint8_t *tile, int row, int64_t blocks, int bits, int groups, int zero, int has_min) {
    for (int64_t b = 0; b < blocks; b++, tile += block_bytes(bits, groups, has_min)) {
        const uint16_t *scales = (const uint16_t *)(tile + codes_bytes(bits));
        for (int c = 0; c < BLOCK; c++) {
            int g = c * groups / BLOCK;
            float min = has_min ? half_to_float(scales[(groups + g) * TILE + row]) : 0;
            int code = code_at(tile, bits, row, c) - zero;
            out[b * BLOCK + c] = from_float(half_to_float(scales[g * TILE + row]) * code + min);
        }
    }
}

/* out [count, 32 * blocks] = rows `ids` of the packed matrix with `rows`; NaN for other ids. */
void dequantize_rows(T *out, const uint8_t *packed, const int64_t *ids, int64_t layout, int64_t count, int64_t rows, int64_t blocks) {
#pragma omp parallel for if (count * blocks * BLOCK > PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= rows) {
            for (int64_t c = 0; c < blocks * BLOCK; c++) out[i * blocks * BLOCK + c] = from_float(NAN);
            continue;
        }
        int row = ids[i] % TILE;
        int64_t first = ids[i] / TILE * blocks;
        switch (layout) {
#define X(name, bits, groups, zero, has_min) \
    case name: dequantize_row(out + i * blocks * BLOCK, packed + first * block_bytes(bits, groups, has_min), row, blocks, bits, groups, zero, has_min); break;
            LAYOUTS(X)
#undef X
        }
    }
}
