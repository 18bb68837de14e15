// Small-M GEMM for Hopper: out = x @ weight.T + bias, for decodes of up to 256 requests, in bfloat16 or FP8.
//
// Such GEMMs are limited by the bandwidth at which weights are read. The weights are operand A of wgmma, which has 64 rows: a
// thread block computes OUTPUTS columns of `out` for all ROWS of x, in steps of BLOCK_K inputs. A producer warp fills a ring of stages
// by TMA, and two consumer warpgroups multiply (wgmma, float32 accumulators) and release the stages. The ring and its
// transaction barriers are CUTLASS's warp-specialized design (github.com/NVIDIA/cutlass, "Efficient GEMM").
//
// If there are fewer tiles than SMs, or the tiles do not fill whole waves, K is split as well, in one of two ways:
// - SPLITS > 1: a cluster computes a tile, and each of its thread blocks a part of the inputs. They exchange their sums through
//   distributed shared memory by st.async, and each thread block reduces and stores a part of the rows.
// - SPLITS == 1: Stream-K (arXiv 2301.03598). The steps of all tiles form one sequence, which is divided into equal parts. The
//   thread block with the first step of a tile adds the partial sums that the others have stored in `partials`. The others
//   start with that tile, so the wait is short.
// With CLUSTER > 1, the thread blocks of a cluster compute neighbouring tiles in lockstep and share x by multicast. With
// ROW_PARTS > 1, they compute the same tile for different rows of x and share the weights by multicast.
//
// PDL: weights are prefetched before the previous kernel has ended, everything else is read after that.
//
// Macros: ROWS (largest number of rows of x per thread block; a multiple of 8, or of 16 for OUTPUTS == 64), OUTPUTS (64: the
// warpgroups divide the rows; 128: they divide the outputs), CLUSTER, SPLITS, ROW_PARTS (1 with CLUSTER > 1), STAGES, GATED (a
// gated MLP: half of a tile is gate, half is up, and silu(gate) * up is stored), HAS_BIAS, FP8 (x and weight are float8 e4m3, with a
// scale per row each), and WGMMA for the rows of a warpgroup.

#include "gemm_common.cuh"

constexpr int OCTETS_AT_ONCE = 4;  // groups of 8 rows that are staged at once for the store, while loads go on
#include "small_m_epilogue.cuh"

constexpr int WEIGHT_BYTES = OUTPUTS * LINE_BYTES, X_BYTES = ROWS * LINE_BYTES, STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr int BOX_ROWS = (ROWS / CLUSTER + 7) / 8 * 8;  // rows of x that each thread block of a cluster loads; the last boxes may overlap
constexpr int STAGE_TX_BYTES = WEIGHT_BYTES + CLUSTER * BOX_ROWS * LINE_BYTES;

// weight: [N, K], or [2 N, K] if GATED; x: [M, K]; out: [M, N]; bias: one value per row of weight. K is a multiple of BLOCK_K,
// N of 8. x_scales: [M], weight_scales: one per row of weight; not read unless FP8.
// partials: float32 [thread blocks, SUMS / 4, 256, 4]. arrived: [thread blocks], 0 before and after the kernel.
// Thread blocks: a multiple of SHARING_BLOCKS * SPLITS; with SPLITS > 1, tiles times ROW_PARTS * SPLITS.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
small_m_gemm(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map, bf16* __restrict__ out,
        const bf16* __restrict__ bias, const float* x_scales, const float* weight_scales, float4* __restrict__ partials, int* __restrict__ arrived, int M, int N, int K) {
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
    const int num_k_blocks = K / BLOCK_K, total = (N + COLUMNS * CLUSTER - 1) / (COLUMNS * CLUSTER) * num_k_blocks;
    int begin = part_begin(total, cluster, num_clusters), end = part_begin(total, cluster + 1, num_clusters);
    if (SPLITS > 1) {
        begin = cluster * num_k_blocks + num_k_blocks * split / SPLITS;
        end = cluster * num_k_blocks + num_k_blocks * (split + 1) / SPLITS;
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
        if (SPLITS > 1) barrier_expect(reduce_barrier, SPLITS * (first_octet(split + 1) - first_octet(split)) * CONSUMERS * 16);
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    if (warp == CONSUMERS / 32) {
        const short sharing_mask = ((1 << SHARING_BLOCKS) - 1) << first_sharing_rank;
        // Weights are read once (evict_first), x is read by all thread blocks (evict_last).
        auto fetch_weight_box = [&](u32 to, int k, int column, u32 barrier) {
            constexpr int PART = COLUMNS / ROW_PARTS;
            if (ROW_PARTS == 1)
                fetch(to, &weight_map, k * BLOCK_K, column, barrier, EVICT_FIRST);
            else
                fetch_multicast(sharing_mask, to + row_part * PART * LINE_BYTES, &weight_map, k * BLOCK_K, column + row_part * PART, barrier, EVICT_FIRST);
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
                fetch(to, &x_map, k * BLOCK_K, first_row, barrier, EVICT_LAST);
            else
                fetch_multicast(sharing_mask, to + row * LINE_BYTES, &x_map, k * BLOCK_K, row, barrier, EVICT_LAST);
        };
        const int ahead = min(STAGES, end - begin);
        int tile = begin / num_k_blocks, k = begin % num_k_blocks, x_k = k;
        if (ROW_PARTS > 1) cluster_sync();  // the other blocks' barriers are initialized
        if (lane == 0)
            for (int s = 0; s < ahead; s++) {
                fetch_weights(tile, k, s);
                if (++k == num_k_blocks) { k = 0; tile++; }
            }
        __syncwarp();
        if (CLUSTER > 1) cluster_sync();
        previous_kernel_wait();
        if (lane == 0) {
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
        }
        __syncwarp();
        if (SPLITS > 1) cluster_sync();  // matches the one in reduce_and_store
    } else {
        if (SHARING_BLOCKS > 1) cluster_sync();
        const int warpgroup = warp >> 2;
        const u32 weight_offset = OUTPUTS == 128 ? warpgroup * 64 * LINE_BYTES : 0, x_offset = OUTPUTS == 64 ? warpgroup * WARPGROUP_ROWS * LINE_BYTES : 0;
        int s = 0, parity = 0, released = begin;
        auto release_last = [&] {  // only if the stage is refilled: then the block that it arrives at waits for it, and so has not exited
            const u32 last = empty + 8 * (s == 0 ? STAGES - 1 : s - 1);
            if (released++ < end - STAGES && lane < SHARING_BLOCKS) SHARING_BLOCKS == 1 ? barrier_arrive(last) : barrier_arrive(last, first_sharing_rank + lane);
        };
        float sums[SUMS];
        for (int step = begin; step < end;) {
            const int tile = step / num_k_blocks, first = step % num_k_blocks, last = min(num_k_blocks, first + end - step);
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
            if (FP8) scale_sums(sums, x_scales, weight_scales, first_row, column_of(tile), M, N);
            if (SPLITS > 1) {
                reduce_and_store(sums, ring, reduce_barrier, out, bias, first_row, column_of(tile), split, row_part, M, N);
                break;
            }
#include "stream_k_fixup.cuh"
        }
    }
    if (SHARING_BLOCKS > 1 && SPLITS == 1) cluster_sync();  // no block exits before its multicast loads have arrived in the others
}
