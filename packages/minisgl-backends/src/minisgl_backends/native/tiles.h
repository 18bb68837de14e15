/* Microkernels of bfloat16 GEMMs, for processors with AVX512-BF16 (vdpbf16ps).

   A block of the weights is [pairs][COLUMNS][2]: one register of all columns per pair of inner indices. The other operand is
   [pairs][count] of pairs, each of which is broadcast. */
#pragma once
#include "common.h"

#if defined(BF16) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_TILES
#include <immintrin.h>

#define COLUMNS 16  /* columns per block: one register */
#define ROWS 16     /* rows per tile: one accumulator register each */
#define PREFETCH 64 /* prefetch distance in cache lines of the weights */

INLINE __m512bh next_pairs(const T *block, int64_t pair) {
    _mm_prefetch((const char *)(block + (pair + PREFETCH) * 2 * COLUMNS), _MM_HINT_T0);
    return (__m512bh)_mm512_loadu_si512(block + pair * 2 * COLUMNS);
}

INLINE __m512 dot_pairs(__m512 sum, uint32_t x, __m512bh w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)x), w);
}

/* sums[r] = row r of x @ block, for 5 to 16 rows. */
INLINE void wide_tile(float (*sums)[COLUMNS], const uint32_t *x, const T *block, int64_t pairs, const int64_t count) {
    __m512 total[ROWS];
    for (int64_t r = 0; r < count; r++) total[r] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        __m512bh w = next_pairs(block, p);
        for (int64_t r = 0; r < count; r++) total[r] = dot_pairs(total[r], x[p * count + r], w);
    }
    for (int64_t r = 0; r < count; r++) _mm512_storeu_ps(sums[r], total[r]);
}

/* The same for few rows, with four accumulators per row to hide the latency of the dot product. */
INLINE void thin_tile(float (*sums)[COLUMNS], const uint32_t *x, const T *block, int64_t pairs, const int64_t count) {
    __m512 total[4][4];
    for (int64_t u = 0; u < 4; u++)
        for (int64_t r = 0; r < count; r++) total[u][r] = _mm512_setzero_ps();
    int64_t p = 0;
    for (; p + 4 <= pairs; p += 4)
        for (int64_t u = 0; u < 4; u++) {
            __m512bh w = next_pairs(block, p + u);
            for (int64_t r = 0; r < count; r++) total[u][r] = dot_pairs(total[u][r], x[(p + u) * count + r], w);
        }
    for (; p < pairs; p++)
        for (int64_t r = 0; r < count; r++) total[0][r] = dot_pairs(total[0][r], x[p * count + r], next_pairs(block, p));
    for (int64_t r = 0; r < count; r++) {
        __m512 even = _mm512_add_ps(total[0][r], total[2][r]), odd = _mm512_add_ps(total[1][r], total[3][r]);
        _mm512_storeu_ps(sums[r], _mm512_add_ps(even, odd));
    }
}

/* One specialization per number of rows, so that the accumulators stay in registers. */
static void gemm_tile(float (*sums)[COLUMNS], const uint32_t *x, const T *block, int64_t pairs, int64_t count) {
    switch (count) {
#define THIN(n) case n: thin_tile(sums, x, block, pairs, n); break;
#define WIDE(n) case n: wide_tile(sums, x, block, pairs, n); break;
        THIN(1) THIN(2) THIN(3) THIN(4) WIDE(5) WIDE(6) WIDE(7) WIDE(8)
        WIDE(9) WIDE(10) WIDE(11) WIDE(12) WIDE(13) WIDE(14) WIDE(15) WIDE(16)
    }
}

INLINE int64_t rows_of_tile(int64_t rows, int64_t first) { return rows - first < ROWS ? rows - first : ROWS; }

INLINE void store_columns(T *out, const float *values, int64_t width) {
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(values));
    _mm256_mask_storeu_epi16(out, width < COLUMNS ? (1u << width) - 1 : 0xffff, rounded);
}
#endif
