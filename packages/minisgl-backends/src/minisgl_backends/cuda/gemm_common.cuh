// Shared parts of small_m_gemm.cu, gated_gemm.cu and int4_gemm.cu. WGMMA stands for the generated source of
// wgmma(float (&sums)[], A a, u64 b, int keep): a wgmma of 64 rows of a, a fixed number of rows of b, and 32 bytes of inputs. A is u64, a
// descriptor of shared memory, or in int4_gemm.cu const u32 (&)[4], the registers of this thread. The wgmma accumulates into sums if
// `keep`, else it overwrites them.

#include "common.cuh"
#include WGMMA

#ifndef FP8
#define FP8 0  // 1 for operands in float8 e4m3 instead of bfloat16
#endif
constexpr int LINE_BYTES = 128;                  // of a row of x or of the weight per stage: the width of the swizzle
constexpr int BLOCK_K = LINE_BYTES / (2 - FP8);  // inputs per stage
constexpr int CONSUMERS = 256;  // consumer threads, two warpgroups

// No .release.cluster: the stage was only read, and the fence would take a microsecond.
__device__ __forceinline__ void barrier_arrive(u32 at, u32 block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                 " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(at), "r"(block) : "memory");
}
// No .release for the same reason: other thread blocks read nothing that was written before it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void fetch_multicast(short blocks, u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5, %6;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
                 : "memory");
}

// wgmma descriptor of a tile in shared memory with 128-byte swizzle; 8 rows are 1,024 bytes.
__device__ __forceinline__ u64 descriptor(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

// Issue the wgmmas of a stage. The empty asm statements keep the sums in registers before and after.
template <int SUMS> __device__ __forceinline__ void wgmma_stage(float (&sums)[SUMS], u64 a, u64 b, bool keep) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < LINE_BYTES / 32; i++) wgmma(sums, a + 2 * i, b + 2 * i, keep || i > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int SUMS> __device__ __forceinline__ void wgmma_wait_all(float (&sums)[SUMS]) {
    wgmma_wait<0>();
    #pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }
__device__ __forceinline__ float silu(float x) { return low_of(pack_bf16(__fdividef(x, 1.f + __expf(-x)), 0.f)); }
// silu(gate) * up of packed pairs, rounded where torch rounds.
__device__ __forceinline__ u32 silu_and_mul(u32 gate, u32 up) {
    return pack_bf16(silu(low_of(gate)) * low_of(up), silu(high_of(gate)) * high_of(up));
}
