// GEMM with fused gated activation for many rows, for Hopper: out = silu(x @ gate.T) * (x @ up.T).
//
// Such GEMMs are compute-bound, or limited by the power that they draw. The fused activation takes little time or power: gate and
// up are not stored and read back, and one warpgroup computes it while the other multiplies.
//
// A tile has 128 rows of x and 128 outputs. A thread holds gate and up of the same outputs in registers. The
// two thread blocks of a cluster have neighbouring rows: one loads the gate weights for both, the other the up weights.
//
// A producer warp fills a ring of stages by TMA, and two consumer warpgroups multiply 64 rows each (wgmma, float32 accumulators),
// as in CUTLASS's cooperative warp-specialized design (github.com/NVIDIA/cutlass, "Efficient GEMM"). The second warpgroup stays
// LAG stages behind the first, so that one multiplies while the other stores. The grid is persistent. Tiles are rasterized in
// blocks of HEIGHT cluster rows, so that the tiles in flight read a square region that fits into the L2 cache.

#include "gemm_common.cuh"

constexpr int ROWS = 128, OUTPUTS = 128, STAGES = 4, LAG = 2, HEIGHT = 8;
constexpr int X_BYTES = ROWS * LINE_BYTES, HALF_BYTES = OUTPUTS * LINE_BYTES, STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr int SUMS = OUTPUTS;                      // per thread: gates of two rows, then their ups
constexpr int BOX = 64, BOX_BYTES = 64 * BOX * 2;  // outputs of 64 rows per TMA store

// Store a warpgroup's 64 rows to `out` from `row` on. A thread has the sums of rows r and r + 8 of its warp's 16 rows, and two
// neighbouring outputs of every 8.
__device__ __forceinline__ void store_sums(float (&sums)[SUMS], u32 staging, const TensorMap* out_map, int row, int column) {
    const int lane = threadIdx.x & 31, warpgroup = threadIdx.x >> 7;
    const bool is_storer = threadIdx.x % 128 == 0;
    const u32 line = staging + ((threadIdx.x >> 5 & 3) * 16 + lane % 16) * BOX * 2;
    auto pack_pair = [&](int column_group, int half) {
        const int i = 4 * column_group + 2 * half, up = i + SUMS / 2;
        return silu_and_mul(pack_bf16(sums[i], sums[i + 1]), pack_bf16(sums[up], sums[up + 1]));
    };
    #pragma unroll
    for (int box = 0; box < OUTPUTS / BOX; box++) {
        if (is_storer) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(OUTPUTS / BOX - 1) : "memory");
        sync<128>(1 + warpgroup);  // the box's staging memory is free
        #pragma unroll
        for (int part = 0; part < BOX / 8; part += 2) {
            const int column_group = box * (BOX / 8) + part;
            const u32 to = line + box * BOX_BYTES + ((part + lane / 16 ^ lane & 7) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(to), "r"(pack_pair(column_group, 0)), "r"(pack_pair(column_group, 1)), "r"(pack_pair(column_group + 1, 0)), "r"(pack_pair(column_group + 1, 1)) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync<128>(1 + warpgroup);
        if (is_storer) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                         ::"l"(out_map), "r"(column + box * BOX), "r"(row), "r"(staging + box * BOX_BYTES) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
}

// weight: [2 N, K], gate before up; x: [M, K]; out: [M, N]. K is a multiple of 64 and at least 64 * LAG, N a multiple of 8.
// Boxes of the tensor maps: OUTPUTS rows of weight, ROWS rows of x, 64 rows of out. Thread blocks: a multiple of 2.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
gated_gemm(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map,
              const __grid_constant__ TensorMap out_map, int M, int N, int K) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u, staging = ring + STAGES * STAGE_BYTES;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int num_k_blocks = K / BLOCK_K, pairs = (M + 2 * ROWS - 1) / (2 * ROWS), columns = (N + OUTPUTS - 1) / OUTPUTS;
    const int tiles = pairs * columns, clusters = gridDim.x / 2;
    auto tile_origin = [&](int tile, int& row, int& column) {
        const int first = tile / (HEIGHT * columns) * HEIGHT, height = min(HEIGHT, pairs - first), inside = tile - first * columns;
        row = ((first + inside % height) * 2 + rank) * ROWS;
        column = inside / height * OUTPUTS;
    };
    if (thread == CONSUMERS) {
        prefetch_map(&x_map);
        prefetch_map(&weight_map);
        prefetch_map(&out_map);
    }
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32 * 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();

    int s = 0, parity = 0;
    auto next_stage = [&] { if (++s == STAGES) { s = 0; parity ^= 1; } };
    if (warp == CONSUMERS / 32) {
        previous_kernel_wait();
        for (int tile = blockIdx.x / 2; tile < tiles && lane == 0; tile += clusters) {
            int row, column;
            tile_origin(tile, row, column);
            for (int k = 0; k < num_k_blocks; k++) {
                const u32 to = ring + s * STAGE_BYTES, barrier = full + 8 * s;
                barrier_wait(empty + 8 * s, parity ^ 1);
                barrier_expect(barrier, STAGE_BYTES);
                fetch(to, &x_map, k * BLOCK_K, row, barrier, EVICT_NORMAL);
                fetch_multicast(3, to + X_BYTES + rank * HALF_BYTES, &weight_map, k * BLOCK_K, rank * N + column, barrier, EVICT_NORMAL);
                next_stage();
            }
        }
        __syncwarp();
    } else {
        const int warpgroup = warp >> 2;
        float sums[SUMS];
        auto release_last = [&] { if (lane < 2) barrier_arrive(empty + 8 * (s == 0 ? STAGES - 1 : s - 1), lane); };
        bool is_ahead = warpgroup == 0;
        if (!is_ahead) sync<CONSUMERS>(3);
        for (int tile = blockIdx.x / 2; tile < tiles; tile += clusters) {
            for (int k = 0; k < num_k_blocks; k++) {
                barrier_wait(full + 8 * s, parity);
                const u32 stage = ring + s * STAGE_BYTES;
                wgmma_stage(sums, descriptor(stage + warpgroup * (X_BYTES / 2)), descriptor(stage + X_BYTES), k > 0);
                wgmma_wait<1>();
                if (k > 0) release_last();
                next_stage();
                if (is_ahead && k == LAG - 1) {
                    asm volatile("bar.arrive 3, %0;" ::"n"(CONSUMERS) : "memory");
                    is_ahead = false;
                }
            }
            wgmma_wait_all(sums);
            release_last();
            int row, column;
            tile_origin(tile, row, column);
            store_sums(sums, staging + warpgroup * (OUTPUTS / BOX) * BOX_BYTES, &out_map, row + warpgroup * 64, column);
        }
        if (thread % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    cluster_sync();  // no block exits before its loads and its barrier arrivals have reached the other
}
