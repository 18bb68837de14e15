// How decode.cu's thread blocks hand each other what they have found of a request. To be defined: GROUP, DIM.

// What a share leaves of a request for another: its values, and after each query's their log-sum-exp. A word that holds NOTHING
// has not come yet.
constexpr u32 NOTHING = 0xFFFFFFFFu;
constexpr int LETTER = GROUP * (DIM + 4);  // words; a query's last three are not used
struct alignas(16) Quad { float x, y, z, w; };
__device__ __forceinline__ u32 word(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == NOTHING ? 0x7FFFFFFFu : bits;  // no number either
}
__device__ __forceinline__ bool has_come(float x) { return __float_as_uint(x) != NOTHING; }
__device__ __forceinline__ bool has_come(const Quad& x) { return has_come(x.x) && has_come(x.y) && has_come(x.z) && has_come(x.w); }
__device__ __forceinline__ Quad look(const u32* at) {
    Quad q;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(q.x), "=f"(q.y), "=f"(q.z), "=f"(q.w) : "l"(at) : "memory");
    return q;
}
__device__ __forceinline__ float look_at_one(const u32* at) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void leave(u32* at, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void leave_one(u32* at, u32 x) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
