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

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));

INLINE Words load_words(const uint8_t *from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* Sum of the 4-column dot products of codes[k] with word k of x, in int32. Codes are below 2^bits, but signed if `bits` is 8. */
#if LANES == 16 && defined(__AVX512VNNI__)
INLINE Floats to_floats(const uint16_t *halves) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves)); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Ints dot(const Words *codes, const int8_t *x, int count, int bits) {
    __m512i sum = _mm512_setzero_si512();
    for (int k = 0; k < count; k++) {
        int32_t word;
        memcpy(&word, x + 4 * k, 4);
        sum = _mm512_dpbusd_epi32(sum, (__m512i)codes[k], _mm512_set1_epi32(word));
    }
    return (Ints)sum;
}
#elif LANES == 8
INLINE Floats to_floats(const uint16_t *halves) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves)); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Ints dot(const Words *codes, const int8_t *x, int count, int bits) {
    const int most = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;  /* products that int16 can sum */
    __m256i sum = _mm256_setzero_si256();
    for (int first = 0; first < count; first += most) {
        __m256i pairs = _mm256_setzero_si256();
        for (int k = first; k < first + most && k < count; k++) {
            int32_t word;
            memcpy(&word, x + 4 * k, 4);
            __m256i w = (__m256i)codes[k], each = _mm256_set1_epi32(word);
            if (bits == 8) each = _mm256_sign_epi8(each, w), w = _mm256_abs_epi8(w);
            __m256i products = _mm256_maddubs_epi16(w, each);
            pairs = k == first ? products : _mm256_add_epi16(pairs, products);
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return (Ints)sum;
}
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
INLINE Ints dot(const Words *codes, const int8_t *x, int count, int bits) {
    Ints sum = {0};
    for (int k = 0; k < count; k++)
        for (int i = 0; i < LANES; i++)
            for (int j = 0; j < 4; j++) {
                int code = ((const uint8_t *)&codes[k])[4 * i + j];
                sum[i] += (bits == 8 ? (int8_t)code : code) * x[4 * k + j];
            }
    return sum;
}
#endif

/* With VNNI, signed codes are multiplied as unsigned ones with this zero. */
#if LANES == 16 && defined(__AVX512VNNI__)
#define SIGNED_ZERO 128
#else
#define SIGNED_ZERO 0
#endif

/* Unpack the codes of one register of rows: codes[k] has columns 4k to 4k + 3. */
INLINE void unpack_codes(Words *codes, const uint8_t *block, int bits) {
    if (bits == 8)
        for (int k = 0; k < 8; k++) codes[k] = load_words(block + k * 4 * TILE) ^ (SIGNED_ZERO ? 0x80808080u : 0);
    if (bits >= 4 && bits < 8)
        for (int k = 0; k < 4; k++) {
            Words both = load_words(block + k * 4 * TILE);
            codes[k] = both & 0x0f0f0f0f;
            codes[k + 4] = both >> 4 & 0x0f0f0f0f;
        }
    if (bits == 6 || bits < 4)
        for (int k = 0; k < 8; k++) {
            Words pairs = load_words(block + plane_of_2(bits) + k / 4 * 4 * TILE);
            int shift = k % 4 * 2;
            if (bits == 6) codes[k] |= (shift <= 4 ? pairs << (4 - shift) : pairs >> (shift - 4)) & 0x30303030;
            else codes[k] = pairs >> shift & 0x03030303;
        }
    if (bits == 5 || bits == 3) {
        Words single = load_words(block + plane_of_1(bits));
        const int to = bits - 1;
        for (int k = 0; k < 8; k++) codes[k] |= (k <= to ? single << (to - k) : single >> (k - to)) & 0x01010101u << to;
    }
}

/* sums[r] = row r of x @ tile.T, for `count` rows of x, which are `blocks` apart. */
INLINE void multiply_rows(float (*sums)[TILE], const uint8_t *tile, const XBlock *x, int64_t blocks, const int count,
                          const int bits, const int groups, const int zero, const int has_min) {
    for (int lane = 0; lane < TILE; lane += LANES) {
        Floats total[MAX_ROWS];
        for (int r = 0; r < count; r++) total[r] = (Floats){0};
        const uint8_t *block = tile;
        for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits, groups, has_min)) {
            Words codes[8];
            __builtin_prefetch(block + 4096 + lane * 16);
            unpack_codes(codes, block + lane * 4, bits);
            const uint16_t *scales = (const uint16_t *)(block + codes_bytes(bits)) + lane;
            for (int g = 0; g < groups; g++) {
                Floats scale = to_floats(scales + g * TILE), min;
                if (has_min) min = to_floats(scales + (groups + g) * TILE);
                else min = scale * -(float)(bits == 8 ? SIGNED_ZERO : zero);
                for (int r = 0; r < count; r++) {
                    const XBlock *from = x + r * blocks + b;
                    Ints product = dot(codes + g * 8 / groups, from->codes + g * BLOCK / groups, 8 / groups, bits);
                    Floats sum = (Floats){0} + (groups == 1 ? from->sum : from->halves[g]);
                    total[r] = multiply_add(__builtin_convertvector(product, Floats), scale * from->scale, total[r]);
                    if (has_min || zero || (bits == 8 && SIGNED_ZERO)) total[r] = multiply_add(min, sum, total[r]);
                }
            }
        }
        for (int r = 0; r < count; r++) memcpy(sums[r] + lane, &total[r], sizeof total[r]);
    }
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
