/* Split-KV decode attention (Flash-Decoding) over pages [P, Hkv, S, D]: one query per request.

   Keys are split into partitions of one length for all requests, so that an output does not depend on the other requests. Keys and
   values are converted to float in blocks of LANES tokens, padded with zeros, and kept in the first-level cache for the G queries
   of their head. */
#include <stdio.h>
#include <stdlib.h>
#include "common.h"

#define PARTITION 128 /* keys per split-KV partition */
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
#define LANES 16
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX__)
#define LANES 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES 4
#define LANE_NUMBERS {0, 1, 2, 3}
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

INLINE Floats load(const float *from) {
    Floats values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE void save(float *to, Floats values) { memcpy(to, &values, sizeof values); }

/* rows[i] = sums of pairs of lanes of rows i and i + step, for all i below `step`, which must be a literal: gcc 12 compiles a
   shuffle whose mask is not constant to scalar code. */
#define ADD_PAIRS(rows, step) \
    UNROLL for (int i = 0; i < (step); i++) { \
        const Ints lanes = LANE_NUMBERS, own = lanes + (((lanes & (step)) != 0) & LANES), other = own ^ (step); \
        rows[i] = __builtin_shuffle(rows[i], rows[i + (step)], own) + __builtin_shuffle(rows[i], rows[i + (step)], other); \
    }

/* Lane j of the result is the sum of rows[j]. */
INLINE Floats sums_of(Floats rows[LANES]) {
#if LANES > 8
    ADD_PAIRS(rows, 8)
#endif
#if LANES > 4
    ADD_PAIRS(rows, 4)
#endif
    ADD_PAIRS(rows, 2)
    ADD_PAIRS(rows, 1)
    return rows[0];
}

/* Convert `count` tokens of one head, from token `first` on, to [LANES][width]. */
INLINE void load_tokens(float *rows, const T *pages, const int32_t *table, int64_t first, int64_t count, int64_t head,
                        int64_t heads, int64_t page_size, const int64_t dim, const int64_t width) {
    const int32_t *page = table + (uint32_t)first / (uint32_t)page_size;
    int64_t in_page = (uint32_t)first % (uint32_t)page_size;
    for (int64_t j = 0; j < count; j++, in_page++) {
        if (in_page == page_size) in_page = 0, page++;
        const T *from = pages + ((*page * heads + head) * page_size + in_page) * dim;
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) rows[j * width + d] = to_float(from[d]);
    }
    memset(rows + count * width, 0, (LANES - count) * width * sizeof *rows);
}

/* Partial output of one partition for the G queries of a KV head: sums of weighted values [G][width], then [G] maximum scores and
   [G] sums of weights. `q` is [G][width], scaled. */
INLINE void attend_partition(float *partial, const float *q, const T *k_pages, const T *v_pages, const int32_t *pages,
                         int64_t start, int64_t stop, int64_t head, int64_t heads, int64_t group, int64_t page_size,
                         float cap, const int64_t dim) {
    const int64_t keys = stop - start, vectors = (dim + LANES - 1) / LANES, width = vectors * LANES;
    float weights[group][PARTITION], rows[LANES * width];
    float *row_maxima = partial + group * width, *sums = row_maxima + group;
    if (width > dim) memset(rows, 0, sizeof rows);
    for (int64_t t = 0; t < keys; t += LANES) {
        load_tokens(rows, k_pages, pages, start + t, keys - t < LANES ? keys - t : LANES, head, heads, page_size, dim, width);
        for (int64_t g = 0; g < group; g++) {
            Floats dots[LANES];
            UNROLL for (int64_t j = 0; j < LANES; j++) {
                dots[j] = load(q + g * width) * load(rows + j * width);
                UNROLL for (int64_t v = 1; v < vectors; v++)
                    dots[j] += load(q + g * width + v * LANES) * load(rows + j * width + v * LANES);
            }
            save(weights[g] + t, sums_of(dots));
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float row_max = -INFINITY, sum = 0;
        if (cap > 0)
#pragma omp simd
            for (int64_t t = 0; t < keys; t++) weights[g][t] = soft_capped(weights[g][t], cap);
#pragma omp simd reduction(max : row_max)
        for (int64_t t = 0; t < keys; t++) row_max = weights[g][t] > row_max ? weights[g][t] : row_max;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < keys; t++) {
            weights[g][t] = exp_of_negative(weights[g][t] - row_max);
            sum += weights[g][t];
        }
        row_maxima[g] = row_max;
        sums[g] = sum;
    }
    memset(partial, 0, group * width * sizeof *partial);
    for (int64_t t = 0; t < keys; t += LANES) {
        const int64_t count = keys - t < LANES ? keys - t : LANES;
        load_tokens(rows, v_pages, pages, start + t, count, head, heads, page_size, dim, width);
        for (int64_t g = 0; g < group; g++)
            UNROLL for (int64_t v = 0; v < vectors; v += 4) {
                const int64_t parts = vectors - v < 4 ? vectors - v : 4;
                float *to = partial + g * width + v * LANES;
                Floats total[4];
                UNROLL for (int64_t i = 0; i < parts; i++) total[i] = load(to + i * LANES);
                for (int64_t j = 0; j < count; j++)
                    UNROLL for (int64_t i = 0; i < parts; i++)
                        total[i] += weights[g][t + j] * load(rows + j * width + (v + i) * LANES);
                UNROLL for (int64_t i = 0; i < parts; i++) save(to + i * LANES, total[i]);
            }
    }
}

/* Memory of this thread, valid until the next call. */
static void *scratch(size_t bytes) {
    static __thread void *memory;
    static __thread size_t size;
    if (bytes > size) {
        free(memory);
        memory = malloc(size = 2 * bytes);
        if (!memory) {
            fprintf(stderr, "no memory for the %zu bytes of partial outputs of an attention step\n", size);
            abort();
        }
    }
    return memory;
}

/* Request of a partition, by the cumulative numbers of partitions [requests + 1]. */
INLINE int64_t request_of(const int64_t *first_partitions, int64_t requests, int64_t partition) {
    int64_t low = 0, high = requests;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first_partitions[middle] <= partition) low = middle;
        else high = middle;
    }
    return low;
}

/* out [N, Hq, D]. Partial outputs of partitions are merged at the end. `cap` and `sinks`: see causal_softmax in ops.c.
   `table_stride`: columns of the page table. `window`: keys that a query attends to, its own included, or 0 for all. */
void decode(T *out, const T *q, int64_t q_stride, const T *k_pages, const T *v_pages, const int32_t *table,
            int64_t table_stride, const int32_t *rows, const int32_t *seq_lens, int64_t requests, int64_t heads, int64_t group,
            int64_t dim, int64_t page_size, float scale, int64_t window, float cap, const float *sinks) {
    const int64_t width = (dim + LANES - 1) / LANES * LANES, partial_size = group * (width + 2);
    int64_t first_partitions[requests + 1]; /* cumulative numbers of partitions of the requests */
    first_partitions[0] = 0;
    for (int64_t n = 0; n < requests; n++) {
        int64_t num_visible = window && seq_lens[n] > window ? window : seq_lens[n];
        first_partitions[n + 1] = first_partitions[n] + (num_visible + PARTITION - 1) / PARTITION;
    }
    const int64_t num_items = first_partitions[requests] * heads;
    float *partials = scratch(num_items * partial_size * sizeof(float)); /* of each request, [heads][partitions] */
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_items; item++) {
            int64_t n = request_of(first_partitions, requests, item / heads);
            int64_t count = first_partitions[n + 1] - first_partitions[n], index = item - first_partitions[n] * heads;
            int64_t head = index / count, stop = seq_lens[n];
            int64_t begin = window && stop > window ? stop - window : 0, start = begin + index % count * PARTITION;
            if (stop > start + PARTITION) stop = start + PARTITION;
            float scaled[group * width];
            const T *from = q + n * q_stride + head * group * dim;
            for (int64_t g = 0; g < group; g++)
                for (int64_t d = 0; d < width; d++) scaled[g * width + d] = d < dim ? to_float(from[g * dim + d]) * scale : 0;
            const int32_t *pages = table + rows[n] * table_stride;
            float *partial = partials + item * partial_size;
            /* Compiled for the common head dimensions, so that their loops are unrolled. */
            if (dim == 64)
                attend_partition(partial, scaled, k_pages, v_pages, pages, start, stop, head, heads, group, page_size, cap, 64);
            else if (dim == 128)
                attend_partition(partial, scaled, k_pages, v_pages, pages, start, stop, head, heads, group, page_size, cap, 128);
            else
                attend_partition(partial, scaled, k_pages, v_pages, pages, start, stop, head, heads, group, page_size, cap, dim);
        }
#pragma omp for
        for (int64_t item = 0; item < requests * heads; item++) {
            int64_t n = item / heads, count = first_partitions[n + 1] - first_partitions[n];
            const float *first = partials + (first_partitions[n] * heads + item % heads * count) * partial_size;
            for (int64_t g = 0; g < group; g++) {
                float row_max = sinks ? sinks[item % heads * group + g] : -INFINITY, sink = row_max, total[dim];
                for (int64_t c = 0; c < count; c++) row_max = fmaxf(row_max, first[c * partial_size + group * width + g]);
                float sum = exp_of_negative(sink - row_max);
                memset(total, 0, sizeof total);
                for (int64_t c = 0; c < count; c++) {
                    const float *partial = first + c * partial_size;
                    float factor = exp_of_negative(partial[group * width + g] - row_max);
                    sum += factor * partial[group * width + group + g];
                    for (int64_t d = 0; d < dim; d++) total[d] += factor * partial[g * width + d];
                }
                for (int64_t d = 0; d < dim; d++) out[(item * group + g) * dim + d] = from_float(total[d] / sum);
            }
        }
    }
}
