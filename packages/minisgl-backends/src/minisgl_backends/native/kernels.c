/* RMSNorm, RoPE, activation, argmax and attention for CPUs, in portable C with OpenMP. `library.py` compiles this file once per
   element type.

   Shape legend: N requests or tokens, Hq and Hkv heads, G = Hq / Hkv, D head dimension, S tokens per page. */
#include <stdio.h>
#include <stdlib.h>
#include "common.h"

/* ---- RMSNorm, RoPE, activation, argmax ---- */

INLINE void norm_row(T *out, const T *x, const T *weight, int64_t size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += to_float(x[i]) * to_float(x[i]);
    float factor = 1 / sqrtf(sum / size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = from_float(to_float(x[i]) * factor * to_float(weight[i]));
}

void rms_norm(T *out, const T *x, int64_t x_stride, const T *weight, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) norm_row(out + row * size, x + row * x_stride, weight, size, eps);
}

/* x += residual; out = norm(x). All tensors are contiguous. */
void add_rms_norm(T *out, T *x, const T *residual, const T *weight, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        T *total = x + row * size;
        const T *other = residual + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) total[i] = from_float(to_float(total[i]) + to_float(other[i]));
        norm_row(out + row * size, total, weight, size, eps);
    }
}

INLINE void rotate_heads(T *x, int64_t heads, int64_t dim, int64_t half, const T *cos, const T *sin, const T *norm,
                         float eps) {
    for (int64_t head = 0; head < heads; head++, x += dim) {
        if (norm) norm_row(x, x, norm, dim, eps);
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float first = to_float(x[i]), second = to_float(x[half + i]), c = to_float(cos[i]), s = to_float(sin[i]);
            x[i] = from_float(first * c - second * s);
            x[half + i] = from_float(second * c + first * s);
        }
    }
}

/* RoPE in place, after the q/k norms unless they are null. The heads of a token are contiguous. */
void rotate(T *q, int64_t q_stride, int64_t q_heads, T *k, int64_t k_stride, int64_t k_heads, const T *cos,
            const T *sin, int64_t tokens, int64_t dim, int64_t half, const T *q_norm, const T *k_norm, float eps) {
#pragma omp parallel for if (tokens * (q_heads + k_heads) * dim > PARALLEL_MIN)
    for (int64_t row = 0; row < tokens; row++) {
        const T *c = cos + row * half, *s = sin + row * half;
        rotate_heads(q + row * q_stride, q_heads, dim, half, c, s, q_norm, eps);
        rotate_heads(k + row * k_stride, k_heads, dim, half, c, s, k_norm, eps);
    }
}

INLINE void activate_row(T *out, const T *gate, const T *up, int64_t size, int is_gelu) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        float x = to_float(gate[i]);
        out[i] = from_float((is_gelu ? gelu_tanh(x) : silu(x)) * to_float(up[i]));
    }
}

/* out = silu(gate) * up, with rows [gate | up]. */
void silu_and_mul(T *out, const T *x, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * size;
        activate_row(out + row * size, gate, gate + size, size, 0);
    }
}

/* out = gelu_tanh(gate) * up, with rows [gate | up]. */
void gelu_tanh_and_mul(T *out, const T *x, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * size;
        activate_row(out + row * size, gate, gate + size, size, 1);
    }
}

/* Index of the first of the largest elements of each row; NaN counts as the largest. */
void argmax(int64_t *out, const T *x, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        const T *values = x + row * size;
        float best = -INFINITY;
#pragma omp simd reduction(max : best)
        for (int64_t i = 0; i < size; i++) {
            float value = to_float(values[i]);
            best = value != value ? INFINITY : value > best ? value : best;
        }
        int64_t at = 0;
        while (at < size - 1 && to_float(values[at]) < best) at++;
        out[row] = at;
    }
}

/* ---- Step inputs and outputs, sampling ---- */

/* See StepOps.decode_inputs: `inputs` [count][tokens] = shared[turn]; the first rows are rows of the table, token ids, positions and
   new pages. */
void decode_inputs(int32_t *ids, int64_t *slots, int32_t *inputs, const int32_t *shared, const int32_t *turn,
                   const int32_t *last_tokens, int32_t *table, int64_t columns, int64_t page_size, int64_t count, int64_t tokens) {
    memcpy(inputs, shared + *turn * count * tokens, count * tokens * sizeof *inputs);
    for (int64_t i = 0; i < tokens; i++) {
        int64_t row = inputs[i], id = inputs[tokens + i], position = inputs[2 * tokens + i], page = inputs[3 * tokens + i];
        int32_t *entry = table + row * columns + position / page_size;
        if (page >= 0) *entry = (int32_t)page;
        slots[i] = *entry * page_size + position % page_size;
        ids[i] = id < 0 ? last_tokens[row] : (int32_t)id;
    }
}

void decode_outputs(const int64_t *sampled, const int32_t *rows, int32_t *last_tokens, int64_t *shared, int32_t *turn, int64_t tokens) {
    memcpy(shared + *turn * tokens, sampled, tokens * sizeof *sampled);
    for (int64_t i = 0; i < tokens; i++) last_tokens[rows[i]] = (int32_t)sampled[i];
    *turn = 1 - *turn;
}

#define SAMPLE_PART 1024

/* weights = exp((x - best) * factor); return their sum. */
INLINE float exp_weights(float *weights, const T *x, int64_t count, float best, float factor) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += weights[i] = exp_of_negative((to_float(x[i]) - best) * factor);
    return sum;
}

/* Token per row: the first of the largest logits where the temperature is 0, else the first at which the cumulative sum of
   exp(logit / temperature) exceeds `uniform` times its total. Sums are kept per part, so that only the crossing part is computed again. */
void sample(int64_t *out, const T *x, const float *temperature, const float *uniform, int64_t rows, int64_t size) {
    const int64_t parts = (size + SAMPLE_PART - 1) / SAMPLE_PART, rest = size - (parts - 1) * SAMPLE_PART;
    argmax(out, x, rows, size);
#pragma omp parallel for if (rows * size > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        const T *values = x + row * size;
        float weights[SAMPLE_PART], sums[parts], best = to_float(values[out[row]]), factor = 1 / temperature[row];
        if (temperature[row] <= 0 || !(fabsf(best) < INFINITY)) continue;
        double total = 0;
        for (int64_t p = 0; p < parts; p++)
            total += sums[p] = exp_weights(weights, values + p * SAMPLE_PART, p < parts - 1 ? SAMPLE_PART : rest, best, factor);
        double left = uniform[row] * total;
        int64_t part = 0;
        while (part < parts - 1 && left >= sums[part]) left -= sums[part++];
        int64_t count = part < parts - 1 ? SAMPLE_PART : rest;
        exp_weights(weights, values + part * SAMPLE_PART, count, best, factor);
        for (int64_t i = 0; i < count && left >= 0; i++)
            if (weights[i] > 0) left -= weights[i], out[row] = part * SAMPLE_PART + i;
    }
}

/* ---- Attention over pages [P, Hkv, S, D] ---- */

void store(const T *k, int64_t k_stride, const T *v, int64_t v_stride, T *k_pages, T *v_pages, const int64_t *slots,
           int64_t tokens, int64_t heads, int64_t page_size, int64_t dim) {
#pragma omp parallel for if (tokens * heads * dim > PARALLEL_MIN)
    for (int64_t row = 0; row < tokens; row++) {
        int64_t first = slots[row] / page_size * heads * page_size + slots[row] % page_size;
        for (int64_t head = 0; head < heads; head++) {
            int64_t to = (first + head * page_size) * dim;
            memcpy(k_pages + to, k + row * k_stride + head * dim, dim * sizeof(T));
            memcpy(v_pages + to, v + row * v_stride + head * dim, dim * sizeof(T));
        }
    }
}

/* Causal softmax of the scaled scores [N * Hkv, G, C, keys], in place; masked keys get weight 0.
   `cap`: soft cap of the scaled scores, or 0. `sinks`: a logit per query head that takes part in the softmax, or null.
   Query c of request n has position first[n] + c. */
void causal_softmax(T *scores, const int64_t *first, int64_t requests, int64_t heads, int64_t group, int64_t queries,
                    int64_t keys, float scale, int64_t window, float cap, const float *sinks) {
    int64_t rows = requests * heads * group * queries;
#pragma omp parallel for if (rows * keys > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        T *x = scores + row * keys;
        int64_t stop = first[row / (heads * group * queries)] + row % queries + 1;
        if (stop > keys) stop = keys;  /* a padded query */
        int64_t start = window && stop > window ? stop - window : 0;
        float largest = -INFINITY, sum = 0, unit = scale;
        if (cap > 0) {
            unit = 1;
#pragma omp simd
            for (int64_t i = start; i < stop; i++) x[i] = from_float(soft_capped(to_float(x[i]) * scale, cap));
        }
#pragma omp simd reduction(max : largest)
        for (int64_t i = start; i < stop; i++) largest = to_float(x[i]) > largest ? to_float(x[i]) : largest;
        if (sinks) {
            float sink = sinks[row / queries % (heads * group)];
            if (sink > largest * unit) largest = sink / unit;
            sum = exp_of_negative(sink - largest * unit);
        }
        float e[stop - start];
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < stop - start; i++) {
            e[i] = exp_of_negative((to_float(x[start + i]) - largest) * unit);
            sum += e[i];
        }
        float factor = 1 / sum;
#pragma omp simd
        for (int64_t i = 0; i < stop - start; i++) x[start + i] = from_float(e[i] * factor);
        memset(x, 0, start * sizeof(T));
        memset(x + stop, 0, (keys - stop) * sizeof(T));
    }
}

#define CHUNK 128 /* keys per split-KV partition */

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

/* Partial output of one chunk for the G queries of a KV head: sums of weighted values [G][D], then [G] maximum scores and [G]
   sums of weights. */
INLINE void attend_chunk(float *partial, const float *q, const T *k_pages, const T *v_pages, const int32_t *pages,
                         int64_t start, int64_t stop, int64_t head, int64_t heads, int64_t group, int64_t page_size,
                         float cap, const int64_t dim) {
    float weights[group][CHUNK], row[dim];
    float *largest = partial + group * dim, *sums = largest + group;
    for (int64_t t = start; t < stop; t++) {
        const T *k = k_pages + key_offset(pages, t, head, heads, page_size, dim);
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) row[d] = to_float(k[d]);
        for (int64_t g = 0; g < group; g++) {
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t d = 0; d < dim; d++) dot += q[g * dim + d] * row[d];
            weights[g][t - start] = dot;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float max_score = -INFINITY, sum = 0;
        if (cap > 0)
#pragma omp simd
            for (int64_t t = 0; t < stop - start; t++) weights[g][t] = soft_capped(weights[g][t], cap);
#pragma omp simd reduction(max : max_score)
        for (int64_t t = 0; t < stop - start; t++) max_score = weights[g][t] > max_score ? weights[g][t] : max_score;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < stop - start; t++) {
            weights[g][t] = exp_of_negative(weights[g][t] - max_score);
            sum += weights[g][t];
        }
        largest[g] = max_score;
        sums[g] = sum;
    }
    memset(partial, 0, group * dim * sizeof(float));
    for (int64_t t = start; t < stop; t++) {
        const T *v = v_pages + key_offset(pages, t, head, heads, page_size, dim);
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) row[d] = to_float(v[d]);
        for (int64_t g = 0; g < group; g++) {
            float weight = weights[g][t - start];
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) partial[g * dim + d] += weight * row[d];
        }
    }
}

/* Split-KV decode attention (Flash-Decoding): one query per request; partial outputs of chunks of keys are merged at the end.
   `cap` and `sinks`: see causal_softmax. */
void decode(T *out, const T *q, int64_t q_stride, const T *k_pages, const T *v_pages, const int32_t *table,
            int64_t columns, const int32_t *rows, const int32_t *seq_lens, int64_t requests, int64_t heads, int64_t group,
            int64_t dim, int64_t page_size, float scale, int64_t window, float cap, const float *sinks) {
    int64_t partial_size = group * (dim + 2), chunks = 1;
    for (int64_t n = 0; n < requests; n++) {
        int64_t num_visible = window && seq_lens[n] > window ? window : seq_lens[n];
        if (num_visible > chunks * CHUNK) chunks = (num_visible + CHUNK - 1) / CHUNK;
    }
    float *partials = scratch(requests * heads * chunks * partial_size * sizeof(float));
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < requests * heads * chunks; item++) {
            int64_t n = item / (heads * chunks), head = item / chunks % heads, stop = seq_lens[n];
            int64_t begin = window && stop > window ? stop - window : 0, start = begin + item % chunks * CHUNK;
            if (start >= stop) continue;
            if (stop > start + CHUNK) stop = start + CHUNK;
            float scaled[group * dim];
            const T *from = q + n * q_stride + head * group * dim;
            for (int64_t i = 0; i < group * dim; i++) scaled[i] = to_float(from[i]) * scale;
            const int32_t *pages = table + rows[n] * columns;
            float *partial = partials + item * partial_size;
            if (dim == 64)
                attend_chunk(partial, scaled, k_pages, v_pages, pages, start, stop, head, heads, group, page_size, cap, 64);
            else if (dim == 128)
                attend_chunk(partial, scaled, k_pages, v_pages, pages, start, stop, head, heads, group, page_size, cap, 128);
            else
                attend_chunk(partial, scaled, k_pages, v_pages, pages, start, stop, head, heads, group, page_size, cap, dim);
        }
#pragma omp for
        for (int64_t item = 0; item < requests * heads; item++) {
            int64_t n = item / heads, num_visible = window && seq_lens[n] > window ? window : seq_lens[n];
            int64_t count = (num_visible + CHUNK - 1) / CHUNK;
            const float *first = partials + item * chunks * partial_size;
            for (int64_t g = 0; g < group; g++) {
                float max_score = sinks ? sinks[item % heads * group + g] : -INFINITY, sink = max_score, total[dim];
                for (int64_t c = 0; c < count; c++) max_score = fmaxf(max_score, first[c * partial_size + group * dim + g]);
                float sum = exp_of_negative(sink - max_score);
                memset(total, 0, sizeof total);
                for (int64_t c = 0; c < count; c++) {
                    const float *partial = first + c * partial_size;
                    float factor = exp_of_negative(partial[group * dim + g] - max_score);
                    sum += factor * partial[group * dim + group + g];
                    for (int64_t d = 0; d < dim; d++) total[d] += factor * partial[g * dim + d];
                }
                for (int64_t d = 0; d < dim; d++) out[(item * group + g) * dim + d] = from_float(total[d] / sum);
            }
        }
    }
}
