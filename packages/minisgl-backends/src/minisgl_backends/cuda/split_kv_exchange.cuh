// Exchange of partial outputs between the thread blocks of decode.cu. Macros: GROUP, DIM.

// A partial output holds, per query, DIM values and then their log-sum-exp. A word that is EMPTY has not arrived yet.
constexpr u32 EMPTY = 0xFFFFFFFFu;
constexpr int PARTIAL_WORDS = GROUP * (DIM + 4);  // words; the last three of each query are padding
struct alignas(16) Quad { float x, y, z, w; };
__device__ __forceinline__ u32 to_word(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == EMPTY ? 0x7FFFFFFFu : bits;  // another NaN
}
__device__ __forceinline__ bool has_arrived(float x) { return __float_as_uint(x) != EMPTY; }
__device__ __forceinline__ bool has_arrived(const Quad& x) { return has_arrived(x.x) && has_arrived(x.y) && has_arrived(x.z) && has_arrived(x.w); }
__device__ __forceinline__ Quad load_relaxed(const u32* at) {
    Quad q;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(q.x), "=f"(q.y), "=f"(q.z), "=f"(q.w) : "l"(at) : "memory");
    return q;
}
__device__ __forceinline__ float load_relaxed_one(const u32* at) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void store_relaxed(u32* at, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void store_relaxed_one(u32* at, u32 x) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
