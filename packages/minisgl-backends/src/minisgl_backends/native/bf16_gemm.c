/* GEMMs of bfloat16 activations and weights, for processors with AVX512-BF16.

   Small-M GEMMs are limited by the bandwidth at which weights are read. So the weights are stored in the order of the inner loop,
   VNNI's blocked layout: [out / 16][in / 2][16][2], with zeros for rows past `out`. */
#include "tiles.h"

#ifdef HAS_TILES
/* Interleave the rows of each tile pair by pair. Must be called within a parallel region. */
static void interleave(uint32_t *to, const T *x, int64_t rows, int64_t pairs) {
#pragma omp for
    for (int64_t first = 0; first < rows; first += ROWS) {
        int64_t count = rows_of_tile(rows, first);
        for (int64_t r = 0; r < count; r++)
            for (int64_t p = 0; p < pairs; p++)
                memcpy(to + first * pairs + p * count + r, x + ((first + r) * pairs + p) * 2, 4);
    }
}

/* out [rows, size] = x [rows, 2 * pairs] @ weight.T, plus bias [size] unless it is null. `scratch` is as large as x. */
void linear(T *out, const T *x, const T *packed, const T *bias, uint32_t *scratch, int64_t rows, int64_t size,
            int64_t pairs) {
#pragma omp parallel
    {
        interleave(scratch, x, rows, pairs);
#pragma omp for
        for (int64_t column = 0; column < size; column += COLUMNS) {
            int64_t width = size - column < COLUMNS ? size - column : COLUMNS;
            for (int64_t first = 0; first < rows; first += ROWS) {
                int64_t count = rows_of_tile(rows, first);
                float sums[ROWS][COLUMNS];
                gemm_tile(sums, scratch + first * pairs, packed + column * pairs * 2, pairs, count);
                for (int64_t r = 0; r < count; r++) {
                    if (bias)
                        for (int64_t i = 0; i < width; i++) sums[r][i] += to_float(bias[column + i]);
                    store_columns(out + (first + r) * size + column, sums[r], width);
                }
            }
        }
    }
}

/* out [rows, size] = silu(x @ gate.T) * (x @ up.T); blocks of gate and up alternate in `packed`. */
void gated(T *out, const T *x, const T *packed, uint32_t *scratch, int64_t rows, int64_t size, int64_t pairs) {
#pragma omp parallel
    {
        interleave(scratch, x, rows, pairs);
#pragma omp for
        for (int64_t column = 0; column < size; column += COLUMNS) {
            const T *gate = packed + column * pairs * 4, *up = gate + COLUMNS * pairs * 2;
            int64_t width = size - column < COLUMNS ? size - column : COLUMNS;
            for (int64_t first = 0; first < rows; first += ROWS) {
                int64_t count = rows_of_tile(rows, first);
                float gates[ROWS][COLUMNS], ups[ROWS][COLUMNS];
                gemm_tile(gates, scratch + first * pairs, gate, pairs, count);
                gemm_tile(ups, scratch + first * pairs, up, pairs, count);
                for (int64_t r = 0; r < count; r++) {
#pragma omp simd
                    for (int64_t i = 0; i < COLUMNS; i++) ups[r][i] *= silu(gates[r][i]);
                    store_columns(out + (first + r) * size + column, ups[r], width);
                }
            }
        }
    }
}
#endif
