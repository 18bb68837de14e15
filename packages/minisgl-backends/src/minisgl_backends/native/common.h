/* Shared by all kernels: the element type T, which is float, or bfloat16 with -DBF16. Arithmetic is in float, and each result
   is rounded once. */
#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef BF16
typedef uint16_t T;

static inline float to_float(T x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline T from_float(float value) {  /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (T)(value != value ? 0x7fc0 : rounded);
}
#else
typedef float T;
static inline float to_float(T x) { return x; }
static inline T from_float(float value) { return value; }
#endif

#define INLINE static inline __attribute__((always_inline))

/* Elements from which on a loop is parallel: starting a parallel loop costs some microseconds. */
#define PARALLEL_MIN 32768
/* Floats that a function may have on its stack. The stacks of OpenMP's threads have 2 MiB or more. */
#define MAX_STACK_FLOATS 131072

/* e^x for x <= 0 with a relative error of about 1e-7; 0 below -87. */
INLINE float exp_of_negative(float x) {
    float clipped = x < -87.0f ? -87.0f : x;
    float n = nearbyintf(clipped * 1.44269504f);
    float r = fmaf(n, -0.693145752f, clipped);
    r = fmaf(n, -1.42860677e-6f, r);
    float p = fmaf(r, 1.0f / 720, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* cap * tanh(x / cap) */
INLINE float soft_capped(float x, float cap) {
    float e = exp_of_negative(-2.0f * fabsf(x) / cap);
    return copysignf(cap * (1.0f - e) / (1.0f + e), x);
}

/* Offset of key t in pages [P, heads, page_size, dim]; `table` is the request's row of the page table. */
INLINE int64_t key_offset(const int32_t *table, int64_t t, int64_t head, int64_t heads, int64_t page_size, int64_t dim) {
    return ((table[t / page_size] * heads + head) * page_size + t % page_size) * dim;
}

/* x * sigmoid(y) */
INLINE float times_sigmoid(float x, float y) {
    float e = exp_of_negative(-fabsf(y));
    return x * (y < 0 ? e : 1.0f) / (1.0f + e);
}

INLINE float silu(float x) { return times_sigmoid(x, x); }

/* x / 2 * (1 + tanh(y)), where 1 + tanh(y) = 2 * sigmoid(2 * y) and y = sqrt(2 / pi) * (x + 0.044715 * x^3) */
INLINE float gelu_tanh(float x) { return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x)); }
