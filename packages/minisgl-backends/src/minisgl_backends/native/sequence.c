/* Several calls of kernels, without a return to Python between them. */
#include "common.h"

typedef union {
    void *p;
    int64_t i;
    float f;
} Argument;

/* The file has an entry per list of argument types, such as X(pi, (void *, int64_t), (a[0].p, a[1].i)); library.py writes it. */
#define X(kinds, types, values) \
    void call_##kinds(void *kernel, const Argument *a) { ((void (*) types)kernel) values; }
#include "callers.h"
#undef X

typedef struct {
    void (*caller)(void *, const Argument *);
    void *kernel;
    const Argument *arguments;
} Call;

void run_calls(const Call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].caller(calls[i].kernel, calls[i].arguments);
}
