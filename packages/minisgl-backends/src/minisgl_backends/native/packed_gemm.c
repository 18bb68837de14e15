/* GEMMs of activations with packed weights (packed.h), in integers.

   Activations are quantized to 8 bits, with a scale per block of 32. The dot product of a block is exact in integers and is then
   added in float, block by block. So a row of the output depends neither on the other rows nor on their number. */
#include "packed.h"

typedef struct {
    float scale, sum, halves[2]; /* scale, and sums of the dequantized 32, first 16 and last 16 values */
    int8_t codes[BLOCK];
} XBlock;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LANES 16
#define MAX_ROWS 8
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define LANES 8
#define MAX_ROWS 4
#else
#define LANES 16
#define MAX_ROWS 4
#endif

#define WIDTH (TILE / LANES) /* registers of the rows of a tile */

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));

INLINE Words load_words(const uint8_t *from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* With VNNI, signed codes are multiplied as unsigned ones with this zero. */
#if LANES == 16 && defined(__AVX512VNNI__)
#define SIGNED_ZERO 128
#else
#define SIGNED_ZERO 0
#endif

/* Codes of columns 4k to 4k + 3 of one register of rows: below 2^bits, but signed if `bits` is 8 and SIGNED_ZERO is 0. */
INLINE Words word_of_codes(const uint8_t *block, int k, int bits) {
    if (bits == 8) return load_words(block + k * 4 * TILE) ^ (SIGNED_ZERO ? 0x80808080u : 0);
    Words codes = {0};
    if (bits >= 4) codes = load_words(block + k % 4 * 4 * TILE) >> (k < 4 ? 0 : 4) & 0x0f0f0f0f;
    if (bits == 6 || bits < 4) {
        Words pairs = load_words(block + plane_of_2(bits) + k / 4 * 4 * TILE);
        int shift = k % 4 * 2;
        if (bits == 6) codes |= (shift <= 4 ? pairs << (4 - shift) : pairs >> (shift - 4)) & 0x30303030;
        else codes = pairs >> shift & 0x03030303;
    }
    if (bits == 5 || bits == 3) {
        Words single = load_words(block + plane_of_1(bits));
        const int to = bits - 1;
        codes |= (k <= to ? single << (to - k) : single >> (k - to)) & 0x01010101u << to;
    }
    return codes;
}

INLINE uint32_t word_of_x(const XBlock *x, int k) {
    uint32_t word;
    memcpy(&word, x->codes + 4 * k, 4);
    return word;
}

#if LANES == 16 && defined(__AVX512VNNI__)
INLINE Floats to_floats(const uint16_t *halves) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves)); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif LANES == 8
INLINE Floats to_floats(const uint16_t *halves) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves)); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#else
INLINE Floats to_floats(const uint16_t *halves) {
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = half_to_float(halves[i]);
    return values;
}
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define AHEAD 2048 /* bytes that the weights are prefetched ahead */

/* sums[r][w] = dot products of columns 4 * from to 4 * to of `count` rows of x, which are `blocks` apart, with register w of the
   rows of a block. Each word of codes is unpacked once and multiplied by all rows of x. */
INLINE void dot(Ints (*sums)[WIDTH], const uint8_t *block, const XBlock *x, int64_t blocks, const int count,
                const int from, const int to, const int bits) {
#if LANES == 8
    const int most = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;  /* products that int16 can sum */
    __m256i pairs[MAX_ROWS][WIDTH];
#endif
    UNROLL for (int k = from; k < to; k++) {
        UNROLL for (int w = 0; w < WIDTH; w++) {
            Words codes = word_of_codes(block + w * LANES * 4, k, bits);
            UNROLL for (int r = 0; r < count; r++) {
                uint32_t word = word_of_x(x + r * blocks, k);
#if LANES == 16 && defined(__AVX512VNNI__)
                Ints before = k == from ? (Ints){0} : sums[r][w];
                sums[r][w] = (Ints)_mm512_dpbusd_epi32((__m512i)before, (__m512i)codes, _mm512_set1_epi32(word));
#elif LANES == 8
                __m256i each = _mm256_set1_epi32(word), factors = (__m256i)codes;
                if (bits == 8) each = _mm256_sign_epi8(each, factors), factors = _mm256_abs_epi8(factors);
                __m256i products = _mm256_maddubs_epi16(factors, each);
                pairs[r][w] = (k - from) % most ? _mm256_add_epi16(pairs[r][w], products) : products;
                __asm__ volatile("" : "+x"(pairs[r][w]));  /* else gcc 12 reorders these steps, and spills registers */
                if (k + 1 < to && (k - from) % most != most - 1) continue;
                Ints wide = (Ints)_mm256_madd_epi16(pairs[r][w], _mm256_set1_epi16(1));
                sums[r][w] = k - from < most ? wide : sums[r][w] + wide;
#else
                Ints sum = k == from ? (Ints){0} : sums[r][w];
                for (int i = 0; i < LANES; i++)
                    for (int j = 0; j < 4; j++) {
                        int code = codes[i] >> (8 * j) & 255;
                        sum[i] += (bits == 8 ? (int8_t)code : code) * (int8_t)(word >> (8 * j));
                    }
                sums[r][w] = sum;
#endif
            }
        }
    }
}

/* sums[r] = row r of x @ tile.T, for `count` rows of x, which are `blocks` apart. */
INLINE void multiply_rows(float (*sums)[TILE], const uint8_t *tile, const XBlock *x, int64_t blocks, const int count,
                          const int bits, const int groups, const int zero, const int has_min) {
    Floats total[MAX_ROWS][WIDTH];
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int w = 0; w < WIDTH; w++) total[r][w] = (Floats){0};
    const int bytes = block_bytes(bits, groups, has_min);
    for (int64_t b = 0; b < blocks; b++, tile += bytes) {
        UNROLL for (int line = 0; line < bytes; line += 64) __builtin_prefetch(tile + AHEAD + line);
        UNROLL for (int g = 0; g < groups; g++) {
            Ints products[MAX_ROWS][WIDTH];
            dot(products, tile, x + b, blocks, count, g * 8 / groups, (g + 1) * 8 / groups, bits);
            UNROLL for (int w = 0; w < WIDTH; w++) {
                const uint16_t *scales = (const uint16_t *)(tile + codes_bytes(bits)) + g * TILE + w * LANES;
                Floats scale = to_floats(scales), min;
                if (has_min) min = to_floats(scales + groups * TILE);
                else min = scale * -(float)(bits == 8 ? SIGNED_ZERO : zero);
                UNROLL for (int r = 0; r < count; r++) {
                    const XBlock *from = x + r * blocks + b;
                    Floats sum = (Floats){0} + (groups == 1 ? from->sum : from->halves[g]), *to = &total[r][w];
                    *to = multiply_add(__builtin_convertvector(products[r][w], Floats), scale * from->scale, *to);
                    if (has_min || zero || (bits == 8 && SIGNED_ZERO)) *to = multiply_add(min, sum, *to);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < count; r++) memcpy(sums[r], total[r], sizeof total[r]);
}

/* One specialization per layout and number of rows, so that the accumulators stay in registers. */
#define X(name, bits, groups, zero, has_min) \
    static void multiply_##name(float (*sums)[TILE], const uint8_t *tile, const XBlock *x, int64_t blocks, int count) { \
        if (count == 8 && MAX_ROWS == 8) multiply_rows(sums, tile, x, blocks, 8 % (MAX_ROWS + 1), bits, groups, zero, has_min); \
        else if (count == 4) multiply_rows(sums, tile, x, blocks, 4, bits, groups, zero, has_min); \
        else if (count == 2) multiply_rows(sums, tile, x, blocks, 2, bits, groups, zero, has_min); \
        else multiply_rows(sums, tile, x, blocks, 1, bits, groups, zero, has_min); \
    }
LAYOUTS(X)
#undef X

typedef void (*Multiply)(float (*)[TILE], const uint8_t *, const XBlock *, int64_t, int);
static const Multiply MULTIPLY[] = {
#define X(name, ...) multiply_##name,
    LAYOUTS(X)
#undef X
};
static const int64_t BLOCK_BYTES[] = {
#define X(name, bits, groups, zero, has_min) bits * BLOCK / 8 * TILE + 2 * TILE * groups * (1 + has_min),
    LAYOUTS(X)
#undef X
};

static void quantize(XBlock *to, const T *x, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++, x += BLOCK) {
        float values[BLOCK], most;
        int32_t codes[BLOCK], halves[2] = {0, 0}, most_bits = 0;
        /* The bits of positive floats have the order of the values, and those of NaN are the largest. */
#pragma omp simd reduction(max : most_bits)
        for (int i = 0; i < BLOCK; i++) {
            int32_t size;
            values[i] = to_float(x[i]);
            memcpy(&size, &values[i], sizeof size);
            size &= 0x7fffffff;
            most_bits = size > most_bits ? size : most_bits;
        }
        memcpy(&most, &most_bits, sizeof most);
        if (!(most < INFINITY)) memset(values, 0, sizeof values), most = NAN; /* all outputs of the row are NaN */
        float scale = most / 127, inverse = most > 1e-30f ? 127 / most : 0;
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) codes[i] = (int32_t)nearbyintf(values[i] * inverse);
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) to[b].codes[i] = (int8_t)codes[i];
        for (int half = 0; half < 2; half++) {
            int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < BLOCK / 2; i++) sum += codes[half * BLOCK / 2 + i];
            halves[half] = sum;
        }
        to[b].scale = scale;
        to[b].sum = scale * (halves[0] + halves[1]);
        for (int half = 0; half < 2; half++) to[b].halves[half] = scale * halves[half];
    }
}

#define CHUNK_BYTES 98304 /* activations of this size stay in the second-level cache while all tiles pass */

/* out [rows, size] = x [rows, 32 * blocks] @ weight.T, plus bias [size] unless it is null; or, if `gated`, silu(gate) * up, where
   the tiles of `up` follow those of `gate`. Rows of x and out are `x_stride` and `out_stride` apart. `scratch` has 48 bytes per
   block of x. If it is null, there is one row, and each thread has its quantized activations on its stack. */
void packed_linear(T *out, int64_t out_stride, const T *x, int64_t x_stride, const uint8_t *packed, const T *bias,
                   XBlock *scratch, int64_t layout, int64_t rows, int64_t size, int64_t blocks, int64_t gated) {
    const int64_t tiles = (size + TILE - 1) / TILE, tile_bytes = blocks * BLOCK_BYTES[layout];
    const int64_t fit = CHUNK_BYTES / (blocks * (int64_t)sizeof(XBlock)) / MAX_ROWS * MAX_ROWS;
    const int64_t chunk = fit < MAX_ROWS ? MAX_ROWS : fit;
    const Multiply multiply = MULTIPLY[layout];
#pragma omp parallel
    {
        XBlock own[scratch ? 1 : blocks], *quantized = scratch ? scratch : own;
        if (!scratch) {
            quantize(own, x, blocks);  /* by each thread, which is faster than a barrier */
        } else {
#pragma omp for
            for (int64_t row = 0; row < rows; row++) quantize(scratch + row * blocks, x + row * x_stride, blocks);
        }
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = tiles * thread / threads, end = tiles * (thread + 1) / threads;
        for (int64_t first = 0; first < rows; first += chunk) {
            const int64_t last = first + chunk < rows ? first + chunk : rows;
            for (int64_t tile = begin; tile < end; tile++) {
                const int64_t width = size - tile * TILE < TILE ? size - tile * TILE : TILE;
                for (int64_t row = first; row < last;) {
                    int count = last - row >= MAX_ROWS ? MAX_ROWS : last - row >= 4 ? 4 : last - row >= 2 ? 2 : 1;
                    float sums[MAX_ROWS][TILE], ups[MAX_ROWS][TILE];
                    multiply(sums, packed + tile * tile_bytes, quantized + row * blocks, blocks, count);
                    if (gated) multiply(ups, packed + (tiles + tile) * tile_bytes, quantized + row * blocks, blocks, count);
                    for (int r = 0; r < count; r++) {
                        T *to = out + (row + r) * out_stride + tile * TILE;
                        if (bias)
                            for (int64_t i = 0; i < width; i++) {
                                sums[r][i] += to_float(bias[tile * TILE + i]);
                                if (gated) ups[r][i] += to_float(bias[size + tile * TILE + i]);
                            }
                        if (gated)
#pragma omp simd
                            for (int64_t i = 0; i < TILE; i++) sums[r][i] = silu(sums[r][i]) * ups[r][i];
                        for (int64_t i = 0; i < width; i++) to[i] = from_float(sums[r][i]);
                    }
                    row += count;
                }
            }
        }
    }
}
