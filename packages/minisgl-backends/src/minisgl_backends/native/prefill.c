/* Attention of prefills over pages [P, Hkv, S, D], by tiles of queries of one head.

   Keys and values are packed first, per request and KV head, padded with zeros to a multiple of 16 keys:
   K [keys / 16][D / 2][16][2] and V [D / 16][keys / 2][16][2]. A tile then takes all its scores, their softmax, and the
   weighted values; scores stay in float, weights are rounded to bfloat16 before they meet V. */
#include "tiles.h"

#ifdef HAS_TILES

/* Sixteen keys of one head, beginning with key `first`. */
INLINE void pack_keys(uint32_t *packed, const T *pages, const int32_t *table, int64_t first, int64_t stop, int64_t head,
                      int64_t heads, int64_t page_size, int64_t dim) {
    for (int64_t j = 0; j < COLUMNS; j++) {
        int64_t t = first + j;
        const T *key = t < stop ? pages + ((table[t / page_size] * heads + head) * page_size + t % page_size) * dim : 0;
        for (int64_t p = 0; p < dim / 2; p++) {
            uint32_t pair = 0;
            if (key) memcpy(&pair, key + 2 * p, 4);
            packed[p * COLUMNS + j] = pair;
        }
    }
}

INLINE void pack_values(T *packed, const T *pages, const int32_t *table, int64_t first, int64_t stop, int64_t keys,
                        int64_t head, int64_t heads, int64_t page_size, int64_t dim) {
    for (int64_t t = first; t < first + COLUMNS; t++) {
        const T *value = t < stop ? pages + ((table[t / page_size] * heads + head) * page_size + t % page_size) * dim : 0;
        for (int64_t d = 0; d < dim; d++)
            packed[d / COLUMNS * keys * COLUMNS + t / 2 * 2 * COLUMNS + d % COLUMNS * 2 + t % 2] = value ? value[d] : 0;
    }
}

/* Scores [blocks][ROWS][COLUMNS] of a tile to unnormalised weights [keys / 2][count] of pairs.
   Returns through `sums` what each row adds up to. Row r sees keys [from[r], to[r]), counted from the first block. */
INLINE void weigh(uint32_t *weights, float *sums, float *scores, const int64_t *from, const int64_t *to, int64_t blocks,
                  int64_t count, float scale) {
    for (int64_t r = 0; r < count; r++) {
        float largest = -INFINITY, sum = 0;
        for (int64_t b = 0; b < blocks; b++) {
            float *row = scores + (b * ROWS + r) * COLUMNS;
            int64_t low = from[r] - b * COLUMNS, high = to[r] - b * COLUMNS;
            if (low > 0 || high < COLUMNS)
                for (int64_t i = 0; i < COLUMNS; i++) row[i] = i >= low && i < high ? row[i] : -INFINITY;
#pragma omp simd reduction(max : largest)
            for (int64_t i = 0; i < COLUMNS; i++) largest = row[i] > largest ? row[i] : largest;
        }
        for (int64_t b = 0; b < blocks; b++) {
            float *row = scores + (b * ROWS + r) * COLUMNS;
            T rounded[COLUMNS];
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < COLUMNS; i++) {
                row[i] = exp_of_negative((row[i] - largest) * scale);
                sum += row[i];
            }
            put_columns(rounded, row, COLUMNS);
            for (int64_t p = 0; p < COLUMNS / 2; p++)
                memcpy(weights + (b * COLUMNS / 2 + p) * count + r, rounded + 2 * p, 4);
        }
        sums[r] = sum;
    }
}

/* `tiles` [num_tiles][2] holds a request and its first query of each tile; `starts` the first token of each request in q
   and out; `places` the first key of each request in `k_room` and `v_room`, in keys, the last being their size; `room` has
   1.5 * ROWS * room_keys floats for each thread. */
void prefill(T *out, const T *q, int64_t q_stride, const T *k_pages, const T *v_pages, const int32_t *table,
             int64_t columns, const int32_t *rows, const int64_t *starts, const int64_t *lens, const int64_t *places,
             int64_t requests, const int32_t *tiles, int64_t num_tiles, int64_t heads, int64_t group, int64_t dim,
             int64_t page_size, float scale, int64_t window, T *k_room, T *v_room, float *room, int64_t room_keys,
             int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        for (int64_t n = 0; n < requests; n++) {
            int64_t keys = places[n + 1] - places[n], blocks = keys / COLUMNS;
            const int32_t *pages = table + rows[n] * columns;
#pragma omp for nowait
            for (int64_t item = 0; item < heads * blocks; item++) {
                int64_t head = item / blocks, first = item % blocks * COLUMNS;
                int64_t place = (places[n] * heads + head * keys) * dim;
                uint32_t *k = (uint32_t *)(k_room + place + first * dim);
                pack_keys(k, k_pages, pages, first, lens[n], head, heads, page_size, dim);
                pack_values(v_room + place, v_pages, pages, first, lens[n], keys, head, heads, page_size, dim);
            }
        }
#pragma omp barrier
        float *scores = room + omp_get_thread_num() * room_keys * ROWS * 3 / 2;
        uint32_t *weights = (uint32_t *)(scores + room_keys * ROWS);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_tiles * heads * group; item++) {
            const int32_t *of_tile = tiles + item / (heads * group) * 2;
            int64_t n = of_tile[0], query = of_tile[1], q_head = item % (heads * group), head = q_head / group;
            int64_t num_queries = starts[n + 1] - starts[n], token = starts[n] + query;
            int64_t count = num_queries - query < ROWS ? num_queries - query : ROWS;
            int64_t position = lens[n] - num_queries + query;
            int64_t begin = window && position + 1 > window ? (position + 1 - window) / COLUMNS * COLUMNS : 0;
            int64_t blocks = (position + count - begin + COLUMNS - 1) / COLUMNS;
            int64_t keys = places[n + 1] - places[n], place = (places[n] * heads + head * keys) * dim;
            int64_t from[ROWS], to[ROWS];
            uint32_t queries[dim / 2 * ROWS];
            for (int64_t r = 0; r < count; r++) {
                for (int64_t p = 0; p < dim / 2; p++)
                    memcpy(queries + p * count + r, q + (token + r) * q_stride + q_head * dim + 2 * p, 4);
                to[r] = position + r + 1 - begin;
                from[r] = window ? to[r] - window : 0;
            }
            for (int64_t b = 0; b < blocks; b++) {
                const T *block = k_room + place + (begin + b * COLUMNS) * dim;
                product((float(*)[COLUMNS])(scores + b * ROWS * COLUMNS), queries, block, dim / 2, count);
            }
            float sums[ROWS], mixed[ROWS][COLUMNS];
            weigh(weights, sums, scores, from, to, blocks, count, scale);
            for (int64_t d = 0; d < dim; d += COLUMNS) {
                product(mixed, weights, v_room + place + d * keys + begin * COLUMNS, blocks * COLUMNS / 2, count);
                for (int64_t r = 0; r < count; r++) {
                    for (int64_t i = 0; i < COLUMNS; i++) mixed[r][i] /= sums[r];
                    put_columns(out + ((token + r) * heads * group + q_head) * dim + d, mixed[r], COLUMNS);
                }
            }
        }
    }
}
#endif
