/* RMSNorm, RoPE, activations, step inputs, sampling, KV store and causal softmax for CPUs, in portable C with OpenMP. `library.py`
   compiles each .c file of this folder once per element type T.

   Shape legend: N requests or tokens, Hq and Hkv heads, G = Hq / Hkv, D head dimension, S tokens per page. */
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

INLINE void norm_rope_heads(T *x, int64_t heads, int64_t dim, int64_t half, const T *cos, const T *sin, const T *norm,
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
void qk_norm_rope(T *q, int64_t q_stride, int64_t q_heads, T *k, int64_t k_stride, int64_t k_heads, const T *cos,
                  const T *sin, int64_t tokens, int64_t dim, int64_t half, const T *q_norm, const T *k_norm, float eps) {
#pragma omp parallel for if (tokens * (q_heads + k_heads) * dim > PARALLEL_MIN)
    for (int64_t row = 0; row < tokens; row++) {
        const T *c = cos + row * half, *s = sin + row * half;
        norm_rope_heads(q + row * q_stride, q_heads, dim, half, c, s, q_norm, eps);
        norm_rope_heads(k + row * k_stride, k_heads, dim, half, c, s, k_norm, eps);
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

/* See StepOps.decode_inputs: `inputs` [count][tokens] = mapped_inputs[buffer_index]; the first rows are rows of the table, token
   ids, positions and new pages. */
void decode_inputs(int32_t *ids, int64_t *slots, int32_t *inputs, const int32_t *mapped_inputs, const int32_t *buffer_index,
                   const int32_t *last_tokens, int32_t *table, int64_t columns, int64_t page_size, int64_t count, int64_t tokens) {
    memcpy(inputs, mapped_inputs + *buffer_index * count * tokens, count * tokens * sizeof *inputs);
    for (int64_t i = 0; i < tokens; i++) {
        int64_t row = inputs[i], id = inputs[tokens + i], position = inputs[2 * tokens + i], page = inputs[3 * tokens + i];
        int32_t *entry = table + row * columns + position / page_size;
        if (page >= 0) *entry = (int32_t)page;
        slots[i] = *entry * page_size + position % page_size;
        ids[i] = id < 0 ? last_tokens[row] : (int32_t)id;
    }
}

/* See StepOps.decode_outputs. */
void decode_outputs(const int64_t *sampled, const int32_t *rows, int32_t *last_tokens, int64_t *mapped_tokens,
                    int32_t *buffer_index, int64_t tokens) {
    memcpy(mapped_tokens + *buffer_index * tokens, sampled, tokens * sizeof *sampled);
    for (int64_t i = 0; i < tokens; i++) last_tokens[rows[i]] = (int32_t)sampled[i];
    *buffer_index = 1 - *buffer_index;
}

#define SAMPLE_PART 1024

/* weights = exp((x - best) * factor); return their sum. */
INLINE float exp_weights(float *weights, const T *x, int64_t count, float best, float factor) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += weights[i] = exp_of_negative((to_float(x[i]) - best) * factor);
    return sum;
}

/* Token per row: the first of the largest logits if the temperature is 0, else the first at which the cumulative sum of
   exp(logit / temperature) exceeds `uniform` times its total. Sums are kept per part of the vocabulary, so that only the part with
   the crossing is computed again. */
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

/* ---- KV store into pages [P, Hkv, S, D], and the softmax of prefills in torch ---- */

/* Copy the K and V of each token to its slot. */
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
   `window`: keys that a query attends to, its own included, or 0 for all. Query c of request n has position first[n] + c. */
void causal_softmax(T *scores, const int64_t *first, int64_t requests, int64_t heads, int64_t group, int64_t queries,
                    int64_t keys, float scale, int64_t window, float cap, const float *sinks) {
    int64_t rows = requests * heads * group * queries;
#pragma omp parallel for if (rows * keys > PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        T *x = scores + row * keys;
        int64_t stop = first[row / (heads * group * queries)] + row % queries + 1;
        if (stop > keys) stop = keys;  /* a padded query */
        int64_t start = window && stop > window ? stop - window : 0;
        float largest = -INFINITY, sum = 0, unit = scale; /* `unit`: factor by which x is still to be scaled */
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
        int64_t num = stop - start;
        if (num <= MAX_STACK_FLOATS) {
            float e[num];
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < num; i++) {
                e[i] = exp_of_negative((to_float(x[start + i]) - largest) * unit);
                sum += e[i];
            }
            float factor = 1 / sum;
#pragma omp simd
            for (int64_t i = 0; i < num; i++) x[start + i] = from_float(e[i] * factor);
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < stop; i++) sum += exp_of_negative((to_float(x[i]) - largest) * unit);
            float factor = 1 / sum;
#pragma omp simd
            for (int64_t i = start; i < stop; i++)
                x[i] = from_float(exp_of_negative((to_float(x[i]) - largest) * unit) * factor);
        }
        memset(x, 0, start * sizeof(T));
        memset(x + stop, 0, (keys - stop) * sizeof(T));
    }
}
