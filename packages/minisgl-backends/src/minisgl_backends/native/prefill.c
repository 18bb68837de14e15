/* Prefill attention over pages [P, Hkv, S, D], in tiles of 16 queries of one head.

   Keys and values are packed first, per request and KV head, and padded with zeros to a multiple of 16 keys:
   K [keys / 16][D / 2][16][2] and V [D / 16][keys / 2][16][2]. A tile's scores have keys as rows, so that the softmax of its 16
   queries is vectorized. Scores stay in float; weights are rounded before they are multiplied by V. */
#include "tiles.h"

#ifdef HAS_TILES

/* Pack sixteen keys of one head, from key `first` on. */
INLINE void pack_keys(uint32_t *packed, const T *pages, const int32_t *table, int64_t first, int64_t stop, int64_t head,
                      int64_t heads, int64_t page_size, int64_t dim) {
    for (int64_t j = 0; j < COLUMNS; j++) {
        int64_t t = first + j;
        const T *key = t < stop ? pages + key_offset(table, t, head, heads, page_size, dim) : 0;
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
        const T *value = t < stop ? pages + key_offset(table, t, head, heads, page_size, dim) : 0;
        for (int64_t d = 0; d < dim; d++)
            packed[d / COLUMNS * keys * COLUMNS + t / 2 * 2 * COLUMNS + d % COLUMNS * 2 + t % 2] = value ? value[d] : 0;
    }
}

/* Round the weights of two keys and pack them into a word. */
INLINE uint32_t pack_pair(float even, float odd) { return from_float(even) | (uint32_t)from_float(odd) << 16; }

/* Softmax of a tile: scores [keys][ROWS] to unnormalized weights [keys / 2][ROWS] of pairs, and their sums.
   `cap`: soft cap of the scaled scores, or 0. `sink`: a logit that takes part in the softmax, or -INFINITY.
   Keys [from[r], to[r]) are visible to query r, keys [all_from, all_to) to all queries. */
INLINE void tile_softmax(uint32_t *weights, float *sums, float *scores, const int64_t *from, const int64_t *to,
                  int64_t all_from, int64_t all_to, int64_t keys, float scale, float cap, float sink) {
    float largest[ROWS], total[ROWS];
    if (cap > 0) {
#pragma omp simd
        for (int64_t i = 0; i < keys * ROWS; i++) scores[i] = soft_capped(scores[i] * scale, cap);
        scale = 1;
    }
    for (int64_t r = 0; r < ROWS; r++) largest[r] = sink / scale;
    for (int64_t t = 0; t < keys; t++) {
        float *row = scores + t * ROWS;
        if (t < all_from || t >= all_to)
            for (int64_t r = 0; r < ROWS; r++) row[r] = t >= from[r] && t < to[r] ? row[r] : -INFINITY;
#pragma omp simd
        for (int64_t r = 0; r < ROWS; r++) largest[r] = row[r] > largest[r] ? row[r] : largest[r];
    }
    for (int64_t r = 0; r < ROWS; r++) total[r] = exp_of_negative(sink - largest[r] * scale);
    for (int64_t p = 0; p < keys / 2; p++) {
        const float *even = scores + 2 * p * ROWS, *odd = even + ROWS;
#pragma omp simd
        for (int64_t r = 0; r < ROWS; r++) {
            float first = exp_of_negative((even[r] - largest[r]) * scale);
            float second = exp_of_negative((odd[r] - largest[r]) * scale);
            total[r] += first + second;
            weights[p * ROWS + r] = pack_pair(first, second);
        }
    }
    for (int64_t r = 0; r < ROWS; r++) sums[r] = total[r];
}

/* `tiles` [num_tiles][2]: request and first query per tile. `cu_seqlens_q`: first token of each request in q and out.
   `cap` and `sinks` (per query head): see causal_softmax. `cu_seqlens_k`: first key of each request in `k_packed` and `v_packed`,
   then the number of keys. `table_stride`: columns of the page table. `window`: see decode.
   `scratch`: 1.5 * ROWS * max_keys floats per thread. */
void prefill(T *out, const T *q, int64_t q_stride, const T *k_pages, const T *v_pages, const int32_t *table,
             int64_t table_stride, const int32_t *rows, const int64_t *cu_seqlens_q, const int64_t *seq_lens,
             const int64_t *cu_seqlens_k, int64_t requests, const int32_t *tiles, int64_t num_tiles, int64_t heads, int64_t group,
             int64_t dim, int64_t page_size, float scale, int64_t window, float cap, const float *sinks, T *k_packed, T *v_packed,
             float *scratch, int64_t max_keys, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        for (int64_t n = 0; n < requests; n++) {
            int64_t keys = cu_seqlens_k[n + 1] - cu_seqlens_k[n], blocks = keys / COLUMNS;
            const int32_t *pages = table + rows[n] * table_stride;
#pragma omp for nowait
            for (int64_t item = 0; item < heads * blocks; item++) {
                int64_t head = item / blocks, first = item % blocks * COLUMNS;
                int64_t offset = (cu_seqlens_k[n] * heads + head * keys) * dim;
                uint32_t *k = (uint32_t *)(k_packed + offset + first * dim);
                pack_keys(k, k_pages, pages, first, seq_lens[n], head, heads, page_size, dim);
                pack_values(v_packed + offset, v_pages, pages, first, seq_lens[n], keys, head, heads, page_size, dim);
            }
        }
#pragma omp barrier
        float *scores = scratch + omp_get_thread_num() * max_keys * ROWS * 3 / 2;
        uint32_t *weights = (uint32_t *)(scores + max_keys * ROWS);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_tiles * heads * group; item++) {
            const int32_t *tile = tiles + item / (heads * group) * 2;
            int64_t n = tile[0], query = tile[1], q_head = item % (heads * group), head = q_head / group;
            int64_t num_queries = cu_seqlens_q[n + 1] - cu_seqlens_q[n], token = cu_seqlens_q[n] + query;
            int64_t count = rows_of_tile(num_queries, query);
            int64_t position = seq_lens[n] - num_queries + query;
            /* The keys that any query of the tile attends to, in whole blocks: `num_visible` from `begin` on. */
            int64_t begin = window && position + 1 > window ? (position + 1 - window) / COLUMNS * COLUMNS : 0;
            int64_t num_visible = (position + count - begin + COLUMNS - 1) / COLUMNS * COLUMNS;
            int64_t keys = cu_seqlens_k[n + 1] - cu_seqlens_k[n], offset = (cu_seqlens_k[n] * heads + head * keys) * dim;
            int64_t from[ROWS], to[ROWS];
            uint32_t queries[dim / 2 * ROWS];
            for (int64_t r = 0; r < ROWS; r++) {
                int64_t copied = r < count ? r : count - 1;  /* padding repeats the last query and is not stored */
                for (int64_t p = 0; p < dim / 2; p++)
                    memcpy(queries + p * ROWS + r, q + (token + copied) * q_stride + q_head * dim + 2 * p, 4);
                to[r] = position + copied + 1 - begin;
                from[r] = window && to[r] > window ? to[r] - window : 0;
            }
            for (int64_t t = 0; t < num_visible; t += COLUMNS) {
                const uint32_t *block = (const uint32_t *)(k_packed + offset + (begin + t) * dim);
                gemm_tile((float(*)[COLUMNS])(scores + t * ROWS), block, (const T *)queries, dim / 2, COLUMNS);
            }
            float sums[ROWS], values[ROWS][COLUMNS];
            tile_softmax(weights, sums, scores, from, to, from[ROWS - 1], to[0], num_visible, scale, cap,
                         sinks ? sinks[q_head] : -INFINITY);
            for (int64_t d = 0; d < dim; d += COLUMNS) {
                gemm_tile(values, weights, v_packed + offset + d * keys + begin * COLUMNS, num_visible / 2, ROWS);
                for (int64_t r = 0; r < count; r++) {
                    for (int64_t i = 0; i < COLUMNS; i++) values[r][i] /= sums[r];
                    store_columns(out + ((token + r) * heads * group + q_head) * dim + d, values[r], COLUMNS);
                }
            }
        }
    }
}
#endif
