/* Attention of prefills over pages [P, Hkv, S, D], by tiles of 16 queries of one head.

   Keys and values are packed first, per request and KV head, padded with zeros to a multiple of 16 keys:
   K [keys / 16][D / 2][16][2] and V [D / 16][keys / 2][16][2]. A tile then takes its scores with keys as rows, so that the
   softmax of its queries is side by side in a register; scores stay in float, weights are rounded before they meet V. */
#include "tiles.h"

#ifdef HAS_TILES

/* Sixteen keys of one head, beginning with key `first`. */
INLINE void pack_keys(uint32_t *packed, const T *pages, const int32_t *table, int64_t first, int64_t stop, int64_t head,
                      int64_t heads, int64_t page_size, int64_t dim) {
    for (int64_t j = 0; j < COLUMNS; j++) {
        int64_t t = first + j;
        const T *key = t < stop ? pages + place_of(table, t, head, heads, page_size, dim) : 0;
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
        const T *value = t < stop ? pages + place_of(table, t, head, heads, page_size, dim) : 0;
        for (int64_t d = 0; d < dim; d++)
            packed[d / COLUMNS * keys * COLUMNS + t / 2 * 2 * COLUMNS + d % COLUMNS * 2 + t % 2] = value ? value[d] : 0;
    }
}

/* The weights of two keys for all queries of a tile, as pairs. */
INLINE uint32_t pair_of(float even, float odd) { return put(even) | (uint32_t)put(odd) << 16; }

/* Scores [keys][ROWS] of a tile's queries to weights [keys / 2][ROWS] of pairs, which add up to `sums`.
   Query r sees keys [from[r], to[r]), all of them keys [all_from, all_to). */
INLINE void weigh(uint32_t *weights, float *sums, float *scores, const int64_t *from, const int64_t *to,
                  int64_t all_from, int64_t all_to, int64_t keys, float scale) {
    float largest[ROWS], total[ROWS];
    for (int64_t r = 0; r < ROWS; r++) largest[r] = -INFINITY, total[r] = 0;
    for (int64_t t = 0; t < keys; t++) {
        float *row = scores + t * ROWS;
        if (t < all_from || t >= all_to)
            for (int64_t r = 0; r < ROWS; r++) row[r] = t >= from[r] && t < to[r] ? row[r] : -INFINITY;
#pragma omp simd
        for (int64_t r = 0; r < ROWS; r++) largest[r] = row[r] > largest[r] ? row[r] : largest[r];
    }
    for (int64_t p = 0; p < keys / 2; p++) {
        const float *even = scores + 2 * p * ROWS, *odd = even + ROWS;
#pragma omp simd
        for (int64_t r = 0; r < ROWS; r++) {
            float first = exp_of_negative((even[r] - largest[r]) * scale);
            float second = exp_of_negative((odd[r] - largest[r]) * scale);
            total[r] += first + second;
            weights[p * ROWS + r] = pair_of(first, second);
        }
    }
    for (int64_t r = 0; r < ROWS; r++) sums[r] = total[r];
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
            int64_t count = rows_of_tile(num_queries, query);
            int64_t position = lens[n] - num_queries + query;
            int64_t begin = window && position + 1 > window ? (position + 1 - window) / COLUMNS * COLUMNS : 0;
            int64_t seen = (position + count - begin + COLUMNS - 1) / COLUMNS * COLUMNS;
            int64_t keys = places[n + 1] - places[n], place = (places[n] * heads + head * keys) * dim;
            int64_t from[ROWS], to[ROWS];
            uint32_t queries[dim / 2 * ROWS];
            for (int64_t r = 0; r < ROWS; r++) {
                int64_t copied = r < count ? r : count - 1;  /* what fills a tile is not written */
                for (int64_t p = 0; p < dim / 2; p++)
                    memcpy(queries + p * ROWS + r, q + (token + copied) * q_stride + q_head * dim + 2 * p, 4);
                to[r] = position + copied + 1 - begin;
                from[r] = window && to[r] > window ? to[r] - window : 0;
            }
            for (int64_t t = 0; t < seen; t += COLUMNS) {
                const uint32_t *block = (const uint32_t *)(k_room + place + (begin + t) * dim);
                product((float(*)[COLUMNS])(scores + t * ROWS), block, (const T *)queries, dim / 2, COLUMNS);
            }
            float sums[ROWS], mixed[ROWS][COLUMNS];
            weigh(weights, sums, scores, from, to, from[ROWS - 1], to[0], seen, scale);
            for (int64_t d = 0; d < dim; d += COLUMNS) {
                product(mixed, weights, v_room + place + d * keys + begin * COLUMNS, seen / 2, ROWS);
                for (int64_t r = 0; r < count; r++) {
                    for (int64_t i = 0; i < COLUMNS; i++) mixed[r][i] /= sums[r];
                    put_columns(out + ((token + r) * heads * group + q_head) * dim + d, mixed[r], COLUMNS);
                }
            }
        }
    }
}
#endif
