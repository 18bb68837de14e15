// Warp-level primitives of decode.cu: ldmatrix and mma fragments, and reductions. Macro: FP8.

#if FP8
#define OPERANDS "f16.f16"
#else
#define OPERANDS "bf16.bf16"
#endif

struct Matrix { u32 a, b, c, d; };
__device__ __forceinline__ Matrix load_matrix(u32 at) {
    Matrix m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.a), "=r"(m.b), "=r"(m.c), "=r"(m.d) : "r"(at) : "memory");
    return m;
}
__device__ __forceinline__ Matrix load_matrix_transposed(u32 at) {
    Matrix m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.a), "=r"(m.b), "=r"(m.c), "=r"(m.d) : "r"(at) : "memory");
    return m;
}
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ void mma(float (&sums)[4], const Matrix& m, u32 low, u32 high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(m.a), "r"(m.b), "r"(m.c), "r"(m.d), "r"(low), "r"(high));
}
// FP8 is multiplied in float16, which a pair of e4m3 converts to in one instruction. These return the pair in the lower and in the
// upper half of a word, and the pairs of its even and of its odd bytes.
__device__ __forceinline__ u32 half_pair(u32 low_bytes) {
    u32 both;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(both) : "r"(low_bytes));
    return both;
}
__device__ __forceinline__ u32 lower_pair(u32 word) { return half_pair(word); }
__device__ __forceinline__ u32 upper_pair(u32 word) { return half_pair(word >> 16); }
__device__ __forceinline__ u32 even_pair(u32 word) { return half_pair(__byte_perm(word, 0, 0x4420)); }
__device__ __forceinline__ u32 odd_pair(u32 word) { return half_pair(__byte_perm(word, 0, 0x4431)); }
__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
constexpr u32 ALL = 0xFFFFFFFFu;
// Reductions over the 8 threads of a warp that hold scores of the same queries.
__device__ __forceinline__ float max_over_keys(float x) {
    for (int i = 4; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, i));
    return x;
}
__device__ __forceinline__ float sum_over_keys(float x) {
    for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(ALL, x, i);
    return x;
}
