/* GEMMs of activations with quantized weights of GGUF files, packed as packed.h describes, in integers.

   Activations are quantized to 8 bits, with a scale per block of 32. The dot product of a block, in K-quants times the integer
   factors of its groups, is exact in integers. It is then added in float, block by block. So a row of the output depends neither on
   the other rows nor on their number. */
#include "packed.h"

/* Quantized activations of one row and one block of 32 columns. */
typedef struct {
    float scale;
    union {
        float sum;     /* sum of the group's dequantized values; for weights with minima, which it is multiplied by */
        int32_t start; /* initial value of the group's dot product, -zero * sum of its `codes`; for weights with a zero point */
    } groups[2];
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

/* With VNNI, signed codes are multiplied as unsigned ones with this zero point. */
#if LANES == 16 && defined(__AVX512VNNI__)
#define SIGNED_ZERO 128
#else
#define SIGNED_ZERO 0
#endif

/* Codes of columns 4k to 4k + 3 of one register of rows: below 2^bits, but signed if `bits` is 8 and SIGNED_ZERO is 0. */
INLINE Words word_of_codes(const uint8_t *block, int k, int bits) {
    if (bits == 8) return load_words(block + k * 4 * TILE) ^ (SIGNED_ZERO ? 0x80808080u : 0);
    Words codes = {0};
    if (bits >= 4) codes = load_words(block + plane_of_4(bits) + k % 4 * 4 * TILE) >> (k < 4 ? 0 : 4) & 0x0f0f0f0f;
    if (bits == 6 || bits < 4) {
        Words pairs = load_words(block + plane_of_2(bits) + k / 4 * 4 * TILE);
        int shift = k % 4 * 2;
        if (bits == 6) codes |= (shift <= 4 ? pairs << (4 - shift) : pairs >> (shift - 4)) & 0x30303030;
        else codes = pairs >> shift & 0x03030303;
    }
    if (bits == 5 || bits == 3) {
        Words single = load_words(block);
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
INLINE Ints to_ints(const uint8_t *bytes) { return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)); }
INLINE Floats to_floats(const uint16_t *halves) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves)); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif LANES == 8
INLINE Ints to_ints(const uint8_t *bytes) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)); }
INLINE Floats to_floats(const uint16_t *halves) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves)); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#else
INLINE Ints to_ints(const uint8_t *bytes) {
    Ints values;
    for (int i = 0; i < LANES; i++) values[i] = (int8_t)bytes[i];
    return values;
}
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

INLINE Floats as_floats(Ints values) { return __builtin_convertvector(values, Floats); }
INLINE Floats all_lanes(float value) { return value - (Floats){0}; } /* value + 0 would need an addition, since -0 + 0 is 0 */

#define UNROLL _Pragma("GCC unroll 16")
#define AHEAD 2048 /* bytes that the weights are prefetched ahead */

/* Zero point of the codes. Types without minima have one or, like Q8_0, signed codes. */
INLINE int zero_of(int type) { return FORMATS[type].bits == 8 ? SIGNED_ZERO : FORMATS[type].zero; }

/* sums[r][w] = dot products of group `g` of `count` rows of x, which are `blocks` apart, with register w of the rows of a block.
   Each word of codes is unpacked once and multiplied by all rows of x. Words 4 apart that share bytes follow each other. */
INLINE void dot(Ints (*sums)[WIDTH], const uint8_t *block, const XBlock *x, int64_t blocks, const int count, const int g,
                const int type) {
    const int bits = FORMATS[type].bits, words = BLOCK / 4 / FORMATS[type].groups, has_pairs = words == 8 && bits < 8;
#if LANES == 8
    const int most = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;  /* products that int16 can sum */
    __m256i pairs[MAX_ROWS][WIDTH];
#endif
    Ints odd = {0}; /* every other word of a single row: one chain of additions would be slower than the memory */
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int w = 0; w < WIDTH; w++) sums[r][w] = (Ints){0} + (zero_of(type) ? x[r * blocks].groups[g].start : 0);
    UNROLL for (int i = 0; i < words; i++) {
        const int k = g * words + (has_pairs ? i / 2 + i % 2 * 4 : i);
        UNROLL for (int w = 0; w < WIDTH; w++) {
            Words codes = word_of_codes(block + w * LANES * 4, k, bits);
            UNROLL for (int r = 0; r < count; r++) {
                uint32_t word = word_of_x(x + r * blocks, k);
#if LANES == 16 && defined(__AVX512VNNI__)
                Ints *to = count == 1 && i % 2 ? &odd : &sums[r][w];
                *to = (Ints)_mm512_dpbusd_epi32((__m512i)*to, (__m512i)codes, _mm512_set1_epi32(word));
#elif LANES == 8
                __m256i each = _mm256_set1_epi32(word), factors = (__m256i)codes;
                if (bits == 8) each = _mm256_sign_epi8(each, factors), factors = _mm256_abs_epi8(factors);
                __m256i products = _mm256_maddubs_epi16(factors, each);
                pairs[r][w] = i % most ? _mm256_add_epi16(pairs[r][w], products) : products;
                __asm__ volatile("" : "+x"(pairs[r][w]));  /* else gcc 12 reorders these steps, and spills registers */
                if (i + 1 == words || i % most == most - 1)
                    sums[r][w] += (Ints)_mm256_madd_epi16(pairs[r][w], _mm256_set1_epi16(1));
#else
                for (int lane = 0; lane < LANES; lane++)
                    for (int j = 0; j < 4; j++) {
                        int code = codes[lane] >> (8 * j) & 255;
                        sums[r][w][lane] += (bits == 8 ? (int8_t)code : code) * (int8_t)(word >> (8 * j));
                    }
#endif
            }
        }
    }
    if (count == 1) sums[0][0] += odd;
}

/* Integers of group g of a K-quant's block, by which the scales or the minima of its superblock are multiplied. */
INLINE Ints factors_of(const uint8_t *block, int g, int w, const int of_minima, const int type) {
    if (type == Q2_K) return to_ints(block + g * TILE + w * LANES) >> (of_minima ? 4 : 0) & 15;
    return to_ints(block + (of_minima * FORMATS[type].groups + g) * TILE + w * LANES);
}

/* Add a block's contribution to dots[r], row r of x @ unit.T, and to minima[r], which the unit's minima are multiplied by. Both lack
   the float16 factors of the unit, which multiply_rows applies. If a unit is one block, the results are set instead of added to. */
INLINE void multiply_block(Floats (*dots)[WIDTH], Floats (*minima)[WIDTH], const uint8_t *block, const XBlock *x, int64_t blocks,
                           const int count, const int type) {
    const int groups = FORMATS[type].groups, has_factors = FORMATS[type].unit > 1;
    Ints products[MAX_ROWS][WIDTH], sums[MAX_ROWS][WIDTH];
    UNROLL for (int g = 0; g < groups; g++) {
        UNROLL for (int w = 0; w < WIDTH; w++)
            UNROLL for (int r = 0; r < count; r++) {
                if (!FORMATS[type].has_min) continue;
                Floats sum = all_lanes(x[r * blocks].groups[g].sum);
                minima[r][w] = has_factors ? multiply_add(as_floats(factors_of(block, g, w, 1, type)), sum, minima[r][w]) : sum;
            }
        dot(sums, block + factors_bytes(type), x, blocks, count, g, type);
        UNROLL for (int w = 0; w < WIDTH; w++)
            UNROLL for (int r = 0; r < count; r++) {
                Ints each = has_factors ? sums[r][w] * factors_of(block, g, w, 0, type) : sums[r][w];
                products[r][w] = g ? products[r][w] + each : each;
            }
    }
    UNROLL for (int w = 0; w < WIDTH; w++)
        UNROLL for (int r = 0; r < count; r++) {
            Floats product = as_floats(products[r][w]), scale = all_lanes(x[r * blocks].scale);
            dots[r][w] = has_factors ? multiply_add(product, scale, dots[r][w]) : product * scale;
        }
}

/* sums[r] = row r of x @ tile.T, for `count` rows of x, which are `blocks` apart. With one row, reading the weights takes longest,
   and hardware prefetchers are faster than prefetch instructions (docs/quantization.md). With more rows, computing takes as long as
   reading, and the instructions help. */
INLINE void multiply_rows(float (*sums)[TILE], const uint8_t *tile, const XBlock *x, int64_t blocks, const int count,
                          const int type) {
    const int64_t prefetched = count > 1 ? unit_bytes(type) / FORMATS[type].unit : 0;
    Floats total[MAX_ROWS][WIDTH] = {0};
    for (int64_t b = 0; b < blocks;) {
        const uint16_t *header = (const uint16_t *)tile;
        Floats dots[MAX_ROWS][WIDTH] = {0}, minima[MAX_ROWS][WIDTH] = {0};
        tile += header_bytes(type);
        for (int i = 0; i < FORMATS[type].unit; i++, b++, tile += block_bytes(type)) {
            UNROLL for (int64_t line = 0; line < prefetched; line += 64) __builtin_prefetch(tile + AHEAD + line);
            multiply_block(dots, minima, tile, x + b, blocks, count, type);
        }
        UNROLL for (int w = 0; w < WIDTH; w++)
            UNROLL for (int r = 0; r < count; r++) {
                total[r][w] = multiply_add(to_floats(header + w * LANES), dots[r][w], total[r][w]);
                if (FORMATS[type].has_min)
                    total[r][w] = multiply_add(to_floats(header + TILE + w * LANES), minima[r][w], total[r][w]);
            }
    }
    UNROLL for (int r = 0; r < count; r++) memcpy(sums[r], total[r], sizeof total[r]);
}

/* One specialization per type and number of rows, so that the accumulators stay in registers. 8 % (MAX_ROWS + 1) is 8 if
   MAX_ROWS is. Otherwise the call is unreachable, but compiled, and a literal 8 would be past the end of its arrays. */
#define X(name) \
    static void multiply_##name(float (*sums)[TILE], const uint8_t *tile, const XBlock *x, int64_t blocks, int count) { \
        if (count == 8 && MAX_ROWS == 8) multiply_rows(sums, tile, x, blocks, 8 % (MAX_ROWS + 1), name); \
        else if (count == 4) multiply_rows(sums, tile, x, blocks, 4, name); \
        else if (count == 2) multiply_rows(sums, tile, x, blocks, 2, name); \
        else multiply_rows(sums, tile, x, blocks, 1, name); \
    }
TYPES(X)
#undef X

static void (*const MULTIPLY[])(float (*)[TILE], const uint8_t *, const XBlock *, int64_t, int) = {
#define X(name) [name] = multiply_##name,
    TYPES(X)
#undef X
};

/* Quantize one row of activations for weights of a type. */
static void quantize(XBlock *to, const T *x, int64_t blocks, int type) {
    const int zero = zero_of(type), has_halves = FORMATS[type].groups == 2;
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
        if (!has_halves) halves[0] += halves[1];
        for (int g = 0; g < 2; g++)
            if (zero) to[b].groups[g].start = -zero * halves[g];
            else to[b].groups[g].sum = scale * halves[g];
    }
}

#define CHUNK_BYTES 98304 /* activations of this size stay in the second-level cache while all tiles pass */

/* out [rows, size] = x [rows, 32 * blocks] @ weight.T, plus bias [size] unless it is null; or, if `gated`, silu(gate) * up, where
   the tiles of `up` follow those of `gate`. Rows of x and out are `x_stride` and `out_stride` apart. `scratch` has 44 bytes per
   block of x. If it is null, there is at most one row, and each thread has its quantized activations on its stack. */
void packed_linear(T *out, int64_t out_stride, const T *x, int64_t x_stride, const uint8_t *packed, const T *bias,
                   XBlock *scratch, int64_t type, int64_t rows, int64_t size, int64_t blocks, int64_t gated) {
    if (!rows) return; /* without `scratch`, a row of x is read */
    const int64_t tiles = (size + TILE - 1) / TILE, stride = tile_bytes(type, blocks);
    const int64_t fit = CHUNK_BYTES / (blocks * (int64_t)sizeof(XBlock)) / MAX_ROWS * MAX_ROWS;
    const int64_t chunk = fit < MAX_ROWS ? MAX_ROWS : fit;
#pragma omp parallel
    {
        XBlock own[scratch ? 1 : blocks], *quantized = scratch ? scratch : own;
        if (!scratch) {
            quantize(own, x, blocks, type);  /* by each thread, which is faster than a barrier */
        } else {
#pragma omp for
            for (int64_t row = 0; row < rows; row++) quantize(scratch + row * blocks, x + row * x_stride, blocks, type);
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
                    MULTIPLY[type](sums, packed + tile * stride, quantized + row * blocks, blocks, count);
                    if (gated) MULTIPLY[type](ups, packed + (tiles + tile) * stride, quantized + row * blocks, blocks, count);
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
