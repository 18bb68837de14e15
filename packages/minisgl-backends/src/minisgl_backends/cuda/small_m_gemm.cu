// Small-M GEMM for Hopper: out = x @ weight.T + bias, for decodes of up to 256 requests.
//
// Such GEMMs are limited by the bandwidth at which weights are read. The weights are operand A of wgmma, which has 64 rows: a
// thread block computes OUTPUTS columns of `out` for all ROWS of x, in steps of 64 inputs. A producer warp fills a ring of stages
// by TMA, and two consumer warpgroups multiply (wgmma, float32 accumulators) and release the stages. The ring and its
// transaction barriers are CUTLASS's warp-specialized design (github.com/NVIDIA/cutlass, "Efficient GEMM").
//
// If there are fewer tiles than SMs, or the tiles do not fill whole waves, K is split as well, in one of two ways:
// - SPLITS > 1: a cluster computes a tile, and each of its thread blocks a part of the inputs. They exchange their sums through
//   distributed shared memory by st.async, and each thread block reduces and stores a part of the rows.
// - SPLITS == 1: Stream-K (arXiv 2301.03598). The steps of all tiles form one sequence, which is divided into equal parts. The
//   thread block with the first step of a tile adds the partial sums that the others have stored in `partials`. These start with
//   that tile, so the wait is short.
// With CLUSTER > 1, the thread blocks of a cluster compute neighbouring tiles in lockstep and share x by multicast. With
// ROW_PARTS > 1, they compute the same tile for different rows of x and share the weights by multicast.
//
// PDL: weights are prefetched before the previous kernel has ended, everything else is read after that.
//
// Macros: ROWS (largest number of rows of x per thread block; a multiple of 8, or of 16 for OUTPUTS == 64), OUTPUTS (64: the
// warpgroups divide the rows; 128: they divide the outputs), CLUSTER, SPLITS, ROW_PARTS (1 with CLUSTER > 1), STAGES, GATED (a
// gated MLP: half of a tile is gate, half is up, and silu(gate) * up is stored), HAS_BIAS, and WGMMA for the rows of a warpgroup.

#include "gemm_common.cuh"

constexpr int GROUP_ROWS = OUTPUTS == 64 ? ROWS / 2 : ROWS;
constexpr int WEIGHT_BYTES = OUTPUTS * DEPTH * 2, X_BYTES = ROWS * DEPTH * 2, STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr int SUMS = GROUP_ROWS / 2;               // of a thread
constexpr int ROW_GROUPS = GROUP_ROWS / 8;             // a thread has 4 sums of each 8 rows: 2 rows, outputs n and n + 8
constexpr int PITCH = OUTPUTS * 2 + 16;            // of a row that waits to be stored: no two threads meet in a bank
constexpr int STORE_THREADS = OUTPUTS == 64 ? 128 : 256; // threads that store the same rows
constexpr int COLUMNS = GATED ? OUTPUTS / 2 : OUTPUTS;
constexpr int SHARING_BLOCKS = CLUSTER * ROW_PARTS;       // thread blocks that share loads by multicast
constexpr int BOX_ROWS = (ROWS / CLUSTER + 7) / 8 * 8;  // rows of x that each of them loads; the last boxes may overlap
constexpr int STAGE_TX_BYTES = WEIGHT_BYTES + CLUSTER * BOX_ROWS * DEPTH * 2;

// First of the 16 outputs of a tile that the warp computes.
__device__ __forceinline__ int first_output() {
    return (OUTPUTS == 128 ? (threadIdx.x >> 7) * 64 : 0) + (threadIdx.x >> 5 & 3) * 16;
}
__device__ __forceinline__ float2 biases(const bf16* bias, int column, int N) {
    if (!HAS_BIAS) return make_float2(0.f, 0.f);
    auto at = [&](int output) {
        int index = GATED && output >= COLUMNS ? N + column + output - COLUMNS : column + output;
        return index < (GATED ? 2 * N : N) ? __uint_as_float((u32)bias[index] << 16) : 0.f;
    };
    int output = first_output() + (threadIdx.x & 31) / 4;
    return make_float2(at(output), at(output + 8));
}

// Store rows that are staged in shared memory to `out`, from `row` on.
__device__ __forceinline__ void store_rows(u32 staging, bf16* out, int row, int num_rows, int column, int M, int N) {
    constexpr int CHUNKS = COLUMNS / 8;  // of 16 bytes
    const int chunks = min(num_rows, M - row) * CHUNKS;
    for (int chunk = threadIdx.x % STORE_THREADS; chunk < chunks; chunk += STORE_THREADS) {
        int m = chunk / CHUNKS, n = chunk % CHUNKS * 8;
        if (column + n >= N) continue;
        uint4 values, up;
        u32 from = staging + m * PITCH + n * 2;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(from) : "memory");
        if (GATED) {
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(up.x), "=r"(up.y), "=r"(up.z), "=r"(up.w) : "r"(from + COLUMNS * 2) : "memory");
            values = make_uint4(silu_and_mul(values.x, up.x), silu_and_mul(values.y, up.y), silu_and_mul(values.z, up.z), silu_and_mul(values.w, up.w));
        }
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out + (long long)(row + m) * N + column + n),
                     "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w) : "memory");  // in asm, since the compiler may split it into 4 stores
    }
}

// Round 8 rows of sums and stage them, transposed, in shared memory.
__device__ __forceinline__ void stage_rows(u32 staging, float a, float b, float c, float d) {
    int lane = threadIdx.x & 31;
    u32 to = staging + (lane & 7) * PITCH + (first_output() + (lane >> 3 & 1) * 8) * 2;
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(to), "r"(pack_bf16(a, b)), "r"(pack_bf16(c, d)) : "memory");
}

// Store a complete tile to `out` from `first_row` on, GROUPS_AT_ONCE * 8 rows at a time.
template <int GROUPS_AT_ONCE> __device__ __forceinline__ void store_sums(float (&sums)[SUMS], u32 staging, bf16* out, const bf16* bias, int first_row, int column,
                                           int M, int N) {
    int warpgroup = threadIdx.x >> 7, row = first_row + (OUTPUTS == 64 ? warpgroup * GROUP_ROWS : 0), id = OUTPUTS == 64 ? 2 + warpgroup : 1;
    if (OUTPUTS == 64) staging += warpgroup * GROUPS_AT_ONCE * 8 * PITCH;
    float2 own_bias = biases(bias, column, N);
    #pragma unroll
    for (int row_group = 0; row_group < ROW_GROUPS; row_group += GROUPS_AT_ONCE) {
        const int count = ROW_GROUPS - row_group < GROUPS_AT_ONCE ? ROW_GROUPS - row_group : GROUPS_AT_ONCE;
        if (row + row_group * 8 >= M) continue;
        sync<STORE_THREADS>(id);
        #pragma unroll
        for (int j = 0; j < count; j++) {
            const int i = 4 * (row_group + j);
            stage_rows(staging + j * 8 * PITCH, sums[i] + own_bias.x, sums[i + 1] + own_bias.x, sums[i + 2] + own_bias.y,
                      sums[i + 3] + own_bias.y);
        }
        sync<STORE_THREADS>(id);
        store_rows(staging, out, row + row_group * 8, count * 8, column, M, N);
    }
}

// First row group that the thread block with part `split` of the inputs reduces, and the largest number of them.
__device__ __forceinline__ int first_row_group(int split) { return ROW_GROUPS * split / SPLITS; }
constexpr int MAX_ROW_GROUPS = (ROW_GROUPS + SPLITS - 1) / SPLITS;

// Reduce the sums of the SPLITS thread blocks that have the same rows and other inputs; each reduces and stores a part of the rows.
__device__ __forceinline__ void reduce_and_store(float (&sums)[SUMS], u32 ring, u32 reduce_barrier, bf16* out, const bf16* bias, int first_row,
                                                  int column, int split, int row_part, int M, int N) {
    int thread = threadIdx.x, warpgroup = thread >> 7;
    u32 own = ring + thread * 16, remote[SPLITS], barrier[SPLITS];  // [SPLITS][MAX_ROW_GROUPS][CONSUMERS] of 4 sums
    #pragma unroll
    for (int to = 0; to < SPLITS; to++) {
        int block = to * ROW_PARTS + row_part;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote[to]) : "r"(own + split * MAX_ROW_GROUPS * CONSUMERS * 16), "r"(block));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier[to]) : "r"(reduce_barrier), "r"(block));
    }
    cluster_sync();  // all blocks have read their stages, which the sums overwrite
    #pragma unroll
    for (int j = 0; j < ROW_GROUPS; j++) {
        const int to = ((j + 1) * SPLITS - 1) / ROW_GROUPS;  // the block that reduces row group j
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(remote[to] + (j - ROW_GROUPS * to / SPLITS) * CONSUMERS * 16), "f"(sums[4 * j]), "f"(sums[4 * j + 1]),
                       "f"(sums[4 * j + 2]), "f"(sums[4 * j + 3]), "r"(barrier[to]) : "memory");
    }
    barrier_wait(reduce_barrier, 0);
    int begin = first_row_group(split), count = first_row_group(split + 1) - begin;
    u32 staging = ring + SPLITS * MAX_ROW_GROUPS * CONSUMERS * 16 + (OUTPUTS == 64 ? warpgroup * MAX_ROW_GROUPS * 8 * PITCH : 0);
    float2 own_bias = biases(bias, column, N);
    for (int j = 0; j < count; j++) {
        float a = own_bias.x, b = own_bias.x, c = own_bias.y, d = own_bias.y;
        #pragma unroll
        for (int from = 0; from < SPLITS; from++) {
            float4 part;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                         : "r"(own + (from * MAX_ROW_GROUPS + j) * CONSUMERS * 16) : "memory");
            a += part.x; b += part.y; c += part.z; d += part.w;
        }
        stage_rows(staging + j * 8 * PITCH, a, b, c, d);
    }
    sync<STORE_THREADS>(OUTPUTS == 64 ? 2 + warpgroup : 1);
    store_rows(staging, out, first_row + (OUTPUTS == 64 ? warpgroup * GROUP_ROWS : 0) + begin * 8, count * 8, column, M, N);
}

// First step of a part, with `total` steps divided into equal parts.
__device__ __forceinline__ int part_begin(int total, int part, int partials) { return (int)((long long)total * part / partials); }

// weight: [N, K], or [2 N, K] if GATED; x: [M, K]; out: [M, N]; bias: one value per row of weight. K is a multiple of 64, N of 8.
// partials: float32 [thread blocks, SUMS / 4, 256, 4]. arrived: [thread blocks], 0 before and after the kernel.
// Thread blocks: a multiple of SHARING_BLOCKS * SPLITS; with SPLITS > 1, tiles times ROW_PARTS * SPLITS.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
small_m_gemm(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map, bf16* __restrict__ out,
        const bf16* __restrict__ bias, float4* __restrict__ partials, int* __restrict__ arrived, int M, int N, int K) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u, staging = ring + STAGES * STAGE_BYTES;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, reduce_barrier = empty + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    u32 rank = 0;
    if (SHARING_BLOCKS * SPLITS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int cluster = blockIdx.x / (SHARING_BLOCKS * SPLITS), num_clusters = gridDim.x / (SHARING_BLOCKS * SPLITS);
    const u32 sharing_rank = SHARING_BLOCKS > 1 ? rank % SHARING_BLOCKS : 0, split = rank / SHARING_BLOCKS, first_sharing_rank = rank - sharing_rank;
    const int row_part = ROW_PARTS > 1 ? sharing_rank : 0, first_row = row_part * ROWS;
    const int depth = K / DEPTH, total = (N + COLUMNS * CLUSTER - 1) / (COLUMNS * CLUSTER) * depth;
    int begin = part_begin(total, cluster, num_clusters), end = part_begin(total, cluster + 1, num_clusters);
    if (SPLITS > 1) {
        begin = cluster * depth + depth * split / SPLITS;
        end = cluster * depth + depth * (split + 1) / SPLITS;
    }
    auto column_of = [&](int tile) { return (tile * CLUSTER + (CLUSTER > 1 ? sharing_rank : 0)) * COLUMNS; };

    if (thread == CONSUMERS) {
        prefetch_map(&weight_map);
        prefetch_map(&x_map);
    }
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32 * SHARING_BLOCKS);
        }
        barrier_init(reduce_barrier, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (SPLITS > 1) barrier_expect(reduce_barrier, SPLITS * (first_row_group(split + 1) - first_row_group(split)) * CONSUMERS * 16);
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    if (warp == CONSUMERS / 32) {
        const short sharing_mask = ((1 << SHARING_BLOCKS) - 1) << first_sharing_rank;
        // Weights are read once (evict_first), x is read by all thread blocks (evict_last).
        auto fetch_weight_box = [&](u32 to, int k, int column, u32 barrier) {
            constexpr int PART = COLUMNS / ROW_PARTS;
            if (ROW_PARTS == 1)
                fetch(to, &weight_map, k * DEPTH, column, barrier, EVICT_FIRST);
            else
                fetch_multicast(sharing_mask, to + row_part * PART * 128, &weight_map, k * DEPTH, column + row_part * PART, barrier, EVICT_FIRST);
        };
        auto fetch_weights = [&](int tile, int k, int s) {
            u32 to = ring + s * STAGE_BYTES, barrier = full + 8 * s;
            barrier_expect(barrier, STAGE_TX_BYTES);
            fetch_weight_box(to, k, column_of(tile), barrier);
            if (GATED) fetch_weight_box(to + WEIGHT_BYTES / 2, k, N + column_of(tile), barrier);
        };
        auto fetch_x = [&](int k, int s) {
            u32 to = ring + s * STAGE_BYTES + WEIGHT_BYTES, barrier = full + 8 * s;
            const int row = min((int)rank * BOX_ROWS, ROWS - BOX_ROWS);
            if (CLUSTER == 1)
                fetch(to, &x_map, k * DEPTH, first_row, barrier, EVICT_LAST);
            else
                fetch_multicast(sharing_mask, to + row * DEPTH * 2, &x_map, k * DEPTH, row, barrier, EVICT_LAST);
        };
        const int ahead = min(STAGES, end - begin);
        int tile = begin / depth, k = begin % depth, x_k = k;
        if (ROW_PARTS > 1) cluster_sync();  // the other blocks' barriers are initialized
        if (lane == 0)
            for (int s = 0; s < ahead; s++) {
                fetch_weights(tile, k, s);
                if (++k == depth) { k = 0; tile++; }
            }
        __syncwarp();
        if (CLUSTER > 1) cluster_sync();
        previous_kernel_wait();
        if (lane == 0) {
            for (int s = 0; s < ahead; s++) {
                fetch_x(x_k, s);
                if (++x_k == depth) x_k = 0;
            }
            int s = 0, parity = 0;
            for (int step = begin + ahead; step < end; step++) {
                barrier_wait(empty + 8 * s, parity);
                fetch_weights(tile, k, s);
                fetch_x(k, s);
                if (++k == depth) { k = 0; tile++; }
                if (++s == STAGES) { s = 0; parity ^= 1; }
            }
        }
        __syncwarp();
        if (SPLITS > 1) cluster_sync();  // matches the one in reduce_and_store
    } else {
        if (SHARING_BLOCKS > 1) cluster_sync();
        const int warpgroup = warp >> 2;
        const u32 weight_offset = OUTPUTS == 128 ? warpgroup * 64 * 128 : 0, x_offset = OUTPUTS == 64 ? warpgroup * GROUP_ROWS * 128 : 0;
        int s = 0, parity = 0, released = begin;
        auto release_last = [&] {  // only if the stage is refilled: then the block that it arrives at waits for it, and so has not exited
            const u32 last = empty + 8 * (s == 0 ? STAGES - 1 : s - 1);
            if (released++ < end - STAGES && lane < SHARING_BLOCKS) SHARING_BLOCKS == 1 ? barrier_arrive(last) : barrier_arrive(last, first_sharing_rank + lane);
        };
        float sums[SUMS];
        for (int step = begin; step < end;) {
            const int tile = step / depth, first = step % depth, last = min(depth, first + end - step);
            step += last - first;
            for (int k = first; k < last; k++) {
                barrier_wait(full + 8 * s, parity);
                const u64 weights = descriptor(ring + s * STAGE_BYTES + weight_offset);
                const u64 rows = descriptor(ring + s * STAGE_BYTES + WEIGHT_BYTES + x_offset);
                wgmma_stage(sums, weights, rows, k > first);
                wgmma_wait<1>();
                if (k > first) release_last();  // its wgmmas have completed
                if (++s == STAGES) { s = 0; parity ^= 1; }
            }
            wgmma_wait_all(sums);
            release_last();
            previous_kernel_wait();
            if (SPLITS > 1) {
                reduce_and_store(sums, ring, reduce_barrier, out, bias, first_row, column_of(tile), split, row_part, M, N);
                break;
            }
            if (first > 0) {  // the tile belongs to an earlier thread block
                float4* to = partials + (long long)blockIdx.x * (SUMS / 4) * CONSUMERS + thread;
                #pragma unroll
                for (int i = 0; i < SUMS; i += 4) __stcg(to + i / 4 * CONSUMERS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
                sync<CONSUMERS>(1);
                if (thread == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(arrived + blockIdx.x) : "memory");
                continue;
            }
            if (last < depth) {
                int others = 0;
                while (cluster + 1 + others < num_clusters && part_begin(total, cluster + 1 + others, num_clusters) < (tile + 1) * depth) others++;
                if (thread < others) {
                    int remote, *flag = arrived + (cluster + 1 + thread) * SHARING_BLOCKS + sharing_rank;
                    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(remote) : "l"(flag) : "memory"); while (!remote);
                    *flag = 0;  // for the next GEMM
                }
                sync<CONSUMERS>(1);
                for (int other = 1; other <= others; other++) {
                    const float4* from = partials + (long long)((cluster + other) * SHARING_BLOCKS + sharing_rank) * (SUMS / 4) * CONSUMERS + thread;
                    #pragma unroll
                    for (int i = 0; i < SUMS; i += 4) {
                        float4 part = __ldcg(from + i / 4 * CONSUMERS);
                        sums[i] += part.x; sums[i + 1] += part.y; sums[i + 2] += part.z; sums[i + 3] += part.w;
                    }
                }
            }
            if (ROW_GROUPS <= 4 || step < end)
                store_sums<4>(sums, staging, out, bias, first_row, column_of(tile), M, N);
            else {  // no more loads: the ring becomes the staging buffer
                sync<CONSUMERS>(1);  // all consumers have read the ring
                store_sums<ROW_GROUPS>(sums, ring, out, bias, first_row, column_of(tile), M, N);
            }
        }
    }
    if (SHARING_BLOCKS > 1 && SPLITS == 1) cluster_sync();  // no block exits before its multicast loads have arrived in the others
}
