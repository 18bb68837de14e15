// out = silu(x @ gate.T) * (x @ up.T) of many rows, for Hopper: what prompts spend half of their time in.
//
// Such products are bound by arithmetic, or by the power that it draws. Here the activation costs neither: no gate and no up is
// ever stored. A tile is 128 rows of x and 128 outputs, gate and up of each beside each other in a thread's registers; a pair of
// thread blocks has neighbouring rows, and each fetches one of gate and up for both. A warp has the copy engine fill a ring of
// stages, and two warp groups multiply 64 rows each (wgmma, float32 sums): CUTLASS's cooperative warp-specialised design
// (github.com/NVIDIA/cutlass, "Efficient GEMM"). The second group stays LAG stages behind the first, so that one multiplies
// while the other stores. Pairs of thread blocks take tiles in turn, HEIGHT pairs of rows before the next outputs, so that what
// is read at about the same time is a square that the L2 cache holds.

#include "products.cuh"

constexpr int ROWS = 128, OUTPUTS = 128, STAGES = 4, LAG = 2, HEIGHT = 8;
constexpr int X_BYTES = ROWS * DEPTH * 2, HALF_BYTES = OUTPUTS * DEPTH * 2, STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr int SUMS = OUTPUTS;                      // of a thread: two rows' gates, then their ups
constexpr int BOX = 64, BOX_BYTES = 64 * BOX * 2;  // outputs of 64 rows that are stored at once

// A warp group's 64 rows to `out` from `row` on. The sums of a thread are those of rows r and r + 8 of a warp's 16, two
// neighbouring outputs of every 8.
__device__ __forceinline__ void store_sums(float (&sums)[SUMS], u32 waiting, const TensorMap* out_map, int row, int column) {
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 7;
    const bool stores = threadIdx.x % 128 == 0;
    const u32 line = waiting + ((threadIdx.x >> 5 & 3) * 16 + lane % 16) * BOX * 2;
    auto two = [&](int eight, int half) {
        const int i = 4 * eight + 2 * half, up = i + SUMS / 2;
        return gated(rounded(sums[i], sums[i + 1]), rounded(sums[up], sums[up + 1]));
    };
    #pragma unroll
    for (int box = 0; box < OUTPUTS / BOX; box++) {
        if (stores) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(OUTPUTS / BOX - 1) : "memory");
        sync<128>(1 + group);  // this box's memory is free
        #pragma unroll
        for (int part = 0; part < BOX / 8; part += 2) {
            const int eight = box * (BOX / 8) + part;
            const u32 to = line + box * BOX_BYTES + ((part + lane / 16 ^ lane & 7) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(to), "r"(two(eight, 0)), "r"(two(eight, 1)), "r"(two(eight + 1, 0)), "r"(two(eight + 1, 1)) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync<128>(1 + group);
        if (stores) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                         ::"l"(out_map), "r"(column + box * BOX), "r"(row), "r"(waiting + box * BOX_BYTES) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
}

// weight [2 N, K], gate above up; x [M, K]; out [M, N]. K is a multiple of 64, N of 8, and K at least 64 * LAG. Maps: weights by
// boxes of OUTPUTS rows, x of ROWS, out of 64. Thread blocks: a multiple of 2.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
gated_product(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map,
              const __grid_constant__ TensorMap out_map, int M, int N, int K) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u, waiting = ring + STAGES * STAGE_BYTES;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int depth = K / DEPTH, pairs = (M + 2 * ROWS - 1) / (2 * ROWS), columns = (N + OUTPUTS - 1) / OUTPUTS;
    const int tiles = pairs * columns, clusters = gridDim.x / 2;
    auto place = [&](int tile, int& row, int& column) {
        const int first = tile / (HEIGHT * columns) * HEIGHT, height = min(HEIGHT, pairs - first), inside = tile - first * columns;
        row = ((first + inside % height) * 2 + rank) * ROWS;
        column = inside / height * OUTPUTS;
    };
    if (thread == CONSUMERS) {
        fetch_map(&x_map);
        fetch_map(&weight_map);
        fetch_map(&out_map);
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
            place(tile, row, column);
            for (int k = 0; k < depth; k++) {
                const u32 to = ring + s * STAGE_BYTES, barrier = full + 8 * s;
                barrier_wait(empty + 8 * s, parity ^ 1);
                barrier_expect(barrier, STAGE_BYTES);
                fetch(to, &x_map, k * DEPTH, row, barrier, EVICT_NORMAL);
                fetch_for(3, to + X_BYTES + rank * HALF_BYTES, &weight_map, k * DEPTH, rank * N + column, barrier, EVICT_NORMAL);
                next_stage();
            }
        }
        __syncwarp();
    } else {
        const int group = warp >> 2;
        float sums[SUMS];
        auto give_back_last = [&] { if (lane < 2) barrier_arrive(empty + 8 * (s == 0 ? STAGES - 1 : s - 1), lane); };
        bool is_ahead = group == 0;
        if (!is_ahead) sync<CONSUMERS>(3);
        for (int tile = blockIdx.x / 2; tile < tiles; tile += clusters) {
            for (int k = 0; k < depth; k++) {
                barrier_wait(full + 8 * s, parity);
                const u32 stage = ring + s * STAGE_BYTES;
                multiply_stage(sums, descriptor(stage + group * (X_BYTES / 2)), descriptor(stage + X_BYTES), k > 0);
                multiplied_but<1>();
                if (k > 0) give_back_last();
                next_stage();
                if (is_ahead && k == LAG - 1) {
                    asm volatile("bar.arrive 3, %0;" ::"n"(CONSUMERS) : "memory");
                    is_ahead = false;
                }
            }
            all_multiplied(sums);
            give_back_last();
            int row, column;
            place(tile, row, column);
            store_sums(sums, waiting + group * (OUTPUTS / BOX) * BOX_BYTES, &out_map, row + group * 64, column);
        }
        if (thread % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    cluster_sync();  // what the other one fetches for this one has come, and it is told what is given back
}
