// Small-M GEMM for Hopper with 4-bit weights (W4A16): out = x @ weight.T + bias, for decodes of up to 256 requests.
//
// The design is that of small_m_gemm.cu: a producer warp fills a ring of stages, two consumer warpgroups multiply, and Stream-K
// splits K. The difference is operand A of wgmma, the weights. A stage has the packed codes of 128 inputs. Each
// warpgroup loads those of its 64 outputs into registers, dequantizes them there, and multiplies from registers. While the tensor
// cores multiply one half of a stage, the other half is dequantized, as in Marlin (arXiv 2408.11743). The codes of the half after
// that are already being loaded.
//
// For few rows (up to MMA_ROWS) the instructions that dequantize take longer than the copies. There, weights are multiplied without
// their scales, which multiply the sums of each group instead. mma.sync then needs fewer instructions than wgmma, which has to be
// given descriptors, and whose sums have to be waited for.
//
// A stage's codes and scales are contiguous in memory (`pack_stages` in kernels/int4_stages.py), so that the producer, which is a
// single warp, copies them with one instruction. The codes are in the order of wgmma's fragments of A, so that a thread loads its
// codes of half a stage with one instruction. Word j of them holds the fragment's register j for four steps of 16 inputs: bits
// 4 * i to 4 * i + 3 of the low and of the high half are two neighbouring inputs of step i.
//
// PDL: codes and scales are prefetched before the previous kernel has ended, everything else is read after that.
//
// If PAIRED, an SM holds thread blocks of two consecutive GEMMs: the next GEMM fills its ring with weights while this one multiplies, so
// that the memory is not idle between them. The SM must hold one thread block of each, not two of the next GEMM, as others would then
// have none. So every other GEMM requests more than half of the shared memory. The others request more than half of the registers, by
// warps that exit at once (`HALVES` in int4_gemm.py).
//
// In a cluster of ROW_PARTS * CLUSTER thread blocks, ROW_PARTS consecutive ones have the same tile and share its codes by multicast.
// The CLUSTER thread blocks with the same rows of x share these rows by multicast.
//
// Macros: ROWS (up to 128, for registers), CLUSTER (1, 2 or 4), ROW_PARTS (1 or 2), STAGES, GATED and HAS_BIAS as in small_m_gemm.cu;
// SCALES (scales per output and stage), PAIRED and WGMMA: wgmma(float (&sums)[], const u32 (&a)[4], u64 b, int keep).

#define OUTPUTS 128
#define SPLITS 1
#include "gemm_common.cuh"

constexpr int OCTETS_AT_ONCE = 4;
#include "small_m_epilogue.cuh"

constexpr int MMA_ROWS = 16;
constexpr int INPUTS = 128;                          // per stage: two boxes of x, whose rows have 128 bytes each
constexpr int CODE_BYTES = 64 * INPUTS / 2;          // of a warpgroup's 64 outputs
constexpr int SCALE_BYTES = 64 * 4;                  // of 64 outputs, for inputs that share a scale
constexpr int PACKED_BYTES = CODE_BYTES + SCALES * SCALE_BYTES;
constexpr int BOX_BYTES = ROWS * 128;
constexpr int STAGE_BYTES = 2 * BOX_BYTES + (2 * PACKED_BYTES + 1023) / 1024 * 1024;
constexpr int FETCHED_ROWS = CLUSTER == 4 ? (ROWS / 2 + 7) / 8 * 8 : ROWS;  // of a box, by one thread block; two of them may overlap
constexpr int STAGE_TX_BYTES = 2 * PACKED_BYTES + (CLUSTER == 4 ? 4 : 2) * FETCHED_ROWS * 128;

// These are executed by all threads of a warp, and take effect in the one with `leader`: so the addresses stay in uniform registers.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes, u32 leader) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; }" ::"r"(barrier), "r"(bytes), "r"(leader) : "memory");
}
// Copy weights, which are read once, to the thread blocks of a mask.
__device__ __forceinline__ void copy_weights(u32 to, const void* from, u32 bytes, u32 barrier, short blocks, u32 leader) {
    if (ROW_PARTS == 1)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4; }"
                     ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST), "r"(leader) : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1], %2, [%3], %4, %5; }"
                     ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(blocks), "l"(EVICT_FIRST), "r"(leader) : "memory");
}
// Fetch a box of x, which all thread blocks read.
__device__ __forceinline__ void fetch_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, short blocks, u32 leader) {
    if (CLUSTER == 1)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; @p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                     " [%0], [%1, {%2, %3}], [%4], %5; }"
                     ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(EVICT_LAST), "r"(leader) : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %7, 0; @p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
                     " [%0], [%1, {%2, %3}], [%4], %5, %6; }"
                     ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(EVICT_LAST), "r"(leader) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(at) : "memory");
    return words;
}
// A scale, and -(128 + zero point), each twice.
struct Scale { u32 factor, offset; };
__device__ __forceinline__ Scale scale_of(u32 word) { return Scale{__byte_perm(word, word, 0x1010), __byte_perm(word, word, 0x3232)}; }
__device__ __forceinline__ u32 load_scale(u32 at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}
// Return code - zero point of the two codes at bits 4 * step of the halves of `word`, in bfloat16. A code in the last mantissa bits of
// 128 is 128 + code, so the sum with the offset is exact.
__device__ __forceinline__ u32 unscaled(u32 word, int step, const Scale& scale) {
    u32 both;
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(both) : "r"(word >> 4 * step));
    asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(both) : "r"(scale.offset));
    return both;
}
// Return (code - zero point) * scale of these codes.
__device__ __forceinline__ u32 dequantize(u32 word, int step, const Scale& scale) {
    u32 both = unscaled(word, step, scale);
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(both) : "r"(scale.factor));
    return both;
}
// Load fragments of x for two mma, each of 8 rows and 16 inputs.
__device__ __forceinline__ void load_fragments(u32 (&to)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
// Add the product of 16 outputs by 8 rows of x over 16 inputs.
__device__ __forceinline__ void mma(float* sums, const u32 (&a)[4], u32 low, u32 high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
// What a thread needs for half a stage, 16 of each 32 inputs, and its addresses. It is loaded while the other half is multiplied.
struct Half {
    u32 codes_at, x_at;
    uint4 codes;
    u32 x[ROWS <= MMA_ROWS ? 2 : 1][ROW_OCTETS][4];  // fragments for mma.sync: two of each box
};
__device__ __forceinline__ void load_half(Half& half, u32 codes_at, u32 x_at) {
    half.codes_at = codes_at, half.x_at = x_at;
    asm volatile("" : "+r"(half.codes_at), "+r"(half.x_at));
    half.codes = load_shared(half.codes_at);
    if constexpr (ROWS <= MMA_ROWS)
        #pragma unroll
        for (int i = 0; i < 2 * ROW_OCTETS; i++) load_fragments(half.x[i / ROW_OCTETS][i % ROW_OCTETS], half.x_at + i / ROW_OCTETS * BOX_BYTES + i % ROW_OCTETS * 1024);
}
// Keep the registers of the addresses until here. Before the compiler reuses them, it waits for the loads.
__device__ __forceinline__ void keep_addresses(const Half& half) { asm volatile("" ::"r"(half.codes_at), "r"(half.x_at)); }
// Add half a stage to partial sums, which have no scale yet, by mma.sync. There are as many of them as scales, but at least two: an mma
// waits for the mma before it with the same sum.
constexpr int PARTIALS = SCALES > 2 ? SCALES : 2;
__device__ __forceinline__ void mma_half(float (&partial)[PARTIALS][SUMS], const Half& half, const u32 (&scale_words)[SCALES][2]) {
    #pragma unroll
    for (int fragment = 0; fragment < 4; fragment++) {
        const u32* words = scale_words[fragment * SCALES / 4];
        const Scale scales[2] = {scale_of(words[0]), scale_of(words[1])};
        const u32 a[4] = {unscaled(half.codes.x, fragment, scales[0]), unscaled(half.codes.y, fragment, scales[1]),
                          unscaled(half.codes.z, fragment, scales[0]), unscaled(half.codes.w, fragment, scales[1])};
        #pragma unroll
        for (int octet = 0; octet < ROW_OCTETS; octet++) {
            const u32* x = half.x[fragment / 2][octet] + fragment % 2 * 2;
            mma(partial[SCALES == 1 ? fragment % 2 : fragment * SCALES / 4] + 4 * octet, a, x[0], x[1]);
        }
    }
}

// weights: [blocks of 2 * 64 outputs, num_k_blocks, 2, PACKED_BYTES], with 64 gate and 64 up outputs per block if GATED; x: [M, K]; out: [M, N];
// bias: one value per output. partials, arrived and thread blocks: as in small_m_gemm.cu.
#if PAIRED
#define BOUNDS __maxnreg__(96)
#else
#define BOUNDS __launch_bounds__(CONSUMERS + 32, 1)
#endif
extern "C" __global__ void BOUNDS
int4_gemm(const char* __restrict__ weights, const __grid_constant__ TensorMap x_map, bf16* __restrict__ out, const bf16* __restrict__ bias,
          float4* __restrict__ partials, int* __restrict__ arrived, int M, int N, int num_output_blocks, int num_k_blocks) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u, staging = ring + STAGES * STAGE_BYTES;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    u32 rank = 0;
    if (SHARING_BLOCKS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int cluster = blockIdx.x / SHARING_BLOCKS, num_clusters = gridDim.x / SHARING_BLOCKS, sharing_rank = rank;
    const int row_part = ROW_PARTS > 1 ? rank % ROW_PARTS : 0, tile_part = CLUSTER > 1 ? rank / ROW_PARTS : 0, first_row = row_part * ROWS;
    const int total = (N + COLUMNS * CLUSTER - 1) / (COLUMNS * CLUSTER) * num_k_blocks;
    const int begin = part_begin(total, cluster, num_clusters), end = part_begin(total, cluster + 1, num_clusters);
    auto column_of = [&](int tile) { return (tile * CLUSTER + tile_part) * COLUMNS; };

    if (thread == CONSUMERS) prefetch_map(&x_map);
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32 * SHARING_BLOCKS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (PAIRED && warp > CONSUMERS / 32) return;

    if (warp == CONSUMERS / 32) {
        const u32 leader = lane == 0;
        short x_mask = 0;
        for (int i = 0; i < CLUSTER; i++) x_mask |= 1 << (i * ROW_PARTS + row_part);
        const short weight_mask = ((1 << ROW_PARTS) - 1) << tile_part * ROW_PARTS;
        auto fetch_weights = [&](int tile, int k, int s) {
            const u32 barrier = full + 8 * s;
            // With ROW_PARTS == 2, each thread block copies the weights of one warpgroup. Past the last tile, the result is not stored.
            const long long block = min(tile * CLUSTER + tile_part, num_output_blocks - 1);
            const int offset = row_part * PACKED_BYTES;
            expect(barrier, STAGE_TX_BYTES, leader);
            copy_weights(ring + s * STAGE_BYTES + 2 * BOX_BYTES + offset, weights + (block * num_k_blocks + k) * 2 * PACKED_BYTES + offset,
                         2 * PACKED_BYTES / ROW_PARTS, barrier, weight_mask, leader);
        };
        auto fetch_x = [&](int k, int s) {
            const u32 to = ring + s * STAGE_BYTES, barrier = full + 8 * s;
            if (CLUSTER == 1) {
                fetch_box(to, &x_map, k * INPUTS, first_row, barrier, 0, leader);
                fetch_box(to + BOX_BYTES, &x_map, k * INPUTS + 64, first_row, barrier, 0, leader);
            } else {
                const int box = tile_part % 2, row = tile_part / 2 * (ROWS - FETCHED_ROWS);
                fetch_box(to + box * BOX_BYTES + row * 128, &x_map, k * INPUTS + box * 64, first_row + row, barrier, x_mask, leader);
            }
        };
        const int ahead = min(STAGES, end - begin);
        int tile = begin / num_k_blocks, k = begin % num_k_blocks, x_k = k;
        if (ROW_PARTS > 1) cluster_sync();  // the other blocks' barriers are initialized
        for (int s = 0; s < ahead; s++) {
            fetch_weights(tile, k, s);
            if (++k == num_k_blocks) { k = 0; tile++; }
        }
        if (CLUSTER > 1 && ROW_PARTS == 1) cluster_sync();
        previous_kernel_wait();
        for (int s = 0; s < ahead; s++) {
            fetch_x(x_k, s);
            if (++x_k == num_k_blocks) x_k = 0;
        }
        int s = 0, parity = 0;
        for (int step = begin + ahead; step < end; step++) {
            barrier_wait(empty + 8 * s, parity);
            fetch_weights(tile, k, s);
            fetch_x(k, s);
            if (++k == num_k_blocks) { k = 0; tile++; }
            if (++s == STAGES) { s = 0; parity ^= 1; }
        }
        __syncwarp();
    } else {
        if (SHARING_BLOCKS > 1) cluster_sync();
        const int warpgroup = warp >> 2;
        const u32 own_weights = ring + 2 * BOX_BYTES + warpgroup * PACKED_BYTES;
        u32 own_codes = own_weights + (thread & 127) * 16, own_scales = own_weights + CODE_BYTES + ((warp & 3) * 16 + lane / 4) * 4;
        // The address of 8 inputs of row lane % 8 of x, with 128-byte swizzle: lanes 0, 8, 16 and 24 address inputs 0, 8, 32 and 40 of the box.
        u32 own_x = ring + (lane & 7) * 128 + (((lane >> 4) * 4 + (lane >> 3 & 1) ^ lane & 7) * 16), x_at = ring, full_at = full, empty_at = empty;
        // Else the compiler would compute these anew for each stage, from a special register that takes long to read.
        asm volatile("" : "+r"(own_codes), "+r"(own_scales), "+r"(own_x), "+r"(x_at), "+r"(full_at), "+r"(empty_at));
        int s = 0, parity = 0, loaded = begin, oldest = 0, released = begin;
        u32 at;  // offset of the last loaded stage
        Half halves[2];
        u32 scale_words[SCALES][2], next_scale_words[SCALES][2];  // of the thread's rows of A: r and r + 8
        auto load_next = [&] {  // the first half of the next stage, and its scales
            if (loaded++ >= end) return;
            barrier_wait(full_at + 8 * s, parity);
            at = s * STAGE_BYTES;
            load_half(halves[0], own_codes + at, own_x + at);
            #pragma unroll
            for (int i = 0; i < 2 * SCALES; i++) next_scale_words[i / 2][i % 2] = load_scale(own_scales + at + i / 2 * SCALE_BYTES + i % 2 * 8 * 4);
            if (++s == STAGES) { s = 0; parity ^= 1; }
        };
        auto release_oldest = [&] {  // only if the stage is refilled: then the block that it arrives at waits for it, and so has not exited
            const u32 barrier = empty_at + 8 * oldest;
            if (released++ < end - STAGES && lane < SHARING_BLOCKS) SHARING_BLOCKS == 1 ? barrier_arrive(barrier) : barrier_arrive(barrier, lane);
            if (++oldest == STAGES) oldest = 0;
        };
        float sums[SUMS];
        u32 fragments[2][4][4];  // A of the halves of a stage: wgmma may still read one while the other is written
        auto multiply_half = [&](int half, u32 stage, bool keep) {
            u32 (&a)[4][4] = fragments[half];
            const uint4& codes = halves[half].codes;
            #pragma unroll
            for (int fragment = 0; fragment < 4; fragment++) {
                const u32* words = scale_words[fragment * SCALES / 4];
                const Scale scales[2] = {scale_of(words[0]), scale_of(words[1])};
                a[fragment][0] = dequantize(codes.x, fragment, scales[0]);
                a[fragment][1] = dequantize(codes.y, fragment, scales[1]);
                a[fragment][2] = dequantize(codes.z, fragment, scales[0]);
                a[fragment][3] = dequantize(codes.w, fragment, scales[1]);
            }
            #pragma unroll
            for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int fragment = 0; fragment < 4; fragment++)  // inputs 32 * fragment + 16 * half
                wgmma(sums, a[fragment], descriptor(stage + fragment / 2 * BOX_BYTES) + 2 * (fragment % 2 * 2 + half), keep || fragment > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            wgmma_wait<1>();
        };
        load_next();
        for (int step = begin; step < end;) {
            const int tile = step / num_k_blocks, first = step % num_k_blocks, last = min(num_k_blocks, first + end - step);
            step += last - first;
            if constexpr (ROWS <= MMA_ROWS) {
                #pragma unroll
                for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
            }
            for (int k = first; k < last; k++) {
                const u32 stage = x_at + at;
                load_half(halves[1], own_codes + at + CODE_BYTES / 2, own_x + at ^ 32);
                #pragma unroll
                for (int i = 0; i < 2 * SCALES; i++) {
                    asm volatile("" : "+r"(next_scale_words[i / 2][i % 2]));  // not earlier, as that would wait for their load
                    scale_words[i / 2][i % 2] = next_scale_words[i / 2][i % 2];
                }
                if constexpr (ROWS <= MMA_ROWS) {
                    float partial[PARTIALS][SUMS] = {};
                    mma_half(partial, halves[0], scale_words);
                    keep_addresses(halves[1]);
                    load_next();
                    mma_half(partial, halves[1], scale_words);
                    keep_addresses(halves[0]);
                    __syncwarp();  // all threads have read the stage
                    release_oldest();
                    #pragma unroll
                    for (int i = 0; i < SUMS; i++) {
                        if constexpr (SCALES == 1) sums[i] += (partial[0][i] + partial[1][i]) * low_of(scale_of(scale_words[0][i / 2 % 2]).factor);
                        else
                            #pragma unroll
                            for (int group = 0; group < SCALES; group++) sums[i] += partial[group][i] * low_of(scale_of(scale_words[group][i / 2 % 2]).factor);
                    }
                } else {
                    multiply_half(0, stage, k > first);
                    keep_addresses(halves[1]);
                    if (k > first) release_oldest();  // the wgmmas of the last stage have completed
                    load_next();
                    multiply_half(1, stage, true);
                    keep_addresses(halves[0]);
                }
            }
            if constexpr (ROWS > MMA_ROWS) {
                wgmma_wait_all(sums);
                release_oldest();
            }
            previous_kernel_wait();
#include "stream_k_fixup.cuh"
        }
    }
    if (SHARING_BLOCKS > 1) cluster_sync();  // no block exits before its multicast loads have arrived in the others
}
