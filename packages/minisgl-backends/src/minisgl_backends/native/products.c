/* Products of activations with packed matrices.

   Few rows are bound by reading the matrix, so it lies in the order in which the inner loop takes it:
   [out / 16][in / 2][16][2], rows past `out` zero. */
#include "tiles.h"

#ifdef HAS_TILES
/* Put the rows of each tile side by side, pair by pair; within a parallel region. */
static void interleave(uint32_t *to, const T *x, int64_t rows, int64_t pairs) {
#pragma omp for
    for (int64_t first = 0; first < rows; first += ROWS) {
        int64_t count = rows_of_tile(rows, first);
        for (int64_t r = 0; r < count; r++)
            for (int64_t p = 0; p < pairs; p++)
                memcpy(to + first * pairs + p * count + r, x + ((first + r) * pairs + p) * 2, 4);
    }
}

/* out [rows, size] = x [rows, 2 * pairs] times the matrix, plus the bias [size] unless it is null.
   `room` is as large as x. */
void linear(T *out, const T *x, const T *packed, const T *bias, uint32_t *room, int64_t rows, int64_t size,
            int64_t pairs) {
#pragma omp parallel
    {
        interleave(room, x, rows, pairs);
#pragma omp for
        for (int64_t column = 0; column < size; column += COLUMNS) {
            int64_t width = size - column < COLUMNS ? size - column : COLUMNS;
            for (int64_t first = 0; first < rows; first += ROWS) {
                int64_t count = rows_of_tile(rows, first);
                float sums[ROWS][COLUMNS];
                product(sums, room + first * pairs, packed + column * pairs * 2, pairs, count);
                for (int64_t r = 0; r < count; r++) {
                    if (bias)
                        for (int64_t i = 0; i < width; i++) sums[r][i] += get(bias[column + i]);
                    put_columns(out + (first + r) * size + column, sums[r], width);
                }
            }
        }
    }
}

/* out [rows, size] = silu(x gate) * (x up), where blocks of gate and up take turns in `packed`. */
void gated(T *out, const T *x, const T *packed, uint32_t *room, int64_t rows, int64_t size, int64_t pairs) {
#pragma omp parallel
    {
        interleave(room, x, rows, pairs);
#pragma omp for
        for (int64_t column = 0; column < size; column += COLUMNS) {
            const T *gate = packed + column * pairs * 4, *up = gate + COLUMNS * pairs * 2;
            int64_t width = size - column < COLUMNS ? size - column : COLUMNS;
            for (int64_t first = 0; first < rows; first += ROWS) {
                int64_t count = rows_of_tile(rows, first);
                float gates[ROWS][COLUMNS], ups[ROWS][COLUMNS];
                product(gates, room + first * pairs, gate, pairs, count);
                product(ups, room + first * pairs, up, pairs, count);
                for (int64_t r = 0; r < count; r++) {
#pragma omp simd
                    for (int64_t i = 0; i < COLUMNS; i++) ups[r][i] *= silu(gates[r][i]);
                    put_columns(out + (first + r) * size + column, ups[r], width);
                }
            }
        }
    }
}
#endif
