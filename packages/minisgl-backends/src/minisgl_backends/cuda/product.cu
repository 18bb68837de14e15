// out = x @ weight.T + bias of few rows, for Hopper: what a decode of up to 256 requests is made of.
//
// All that matters is how fast the weights come in, so they go through the tensor cores as the larger operand: a thread block
// holds OUTPUTS of them (columns of `out`) and all ROWS of x, and walks along the inputs 64 at a time. A warp has the copy
// engine fill a ring of stages, two warp groups multiply (wgmma, float32 sums) and give the stages back; the ring, and its
// barriers that count bytes, are CUTLASS's warp-specialised design (github.com/NVIDIA/cutlass, "Efficient GEMM").
//
// Where there are fewer tiles than processors, or no whole number of them for each, the inputs are cut as well, in one of two ways:
// - SPLITS > 1: a cluster has a tile, each of its thread blocks a part of the inputs; they send each other their sums through
//   distributed shared memory, by stores that a barrier there counts, and each adds up and stores some of the rows.
// - SPLITS == 1: Stream-K (arXiv 2301.03598). The 64-input steps of all tiles are one line, cut into equal parts. Who has the
//   beginning of a tile adds up what the others have left in `parts`; these did that part first of all, so nobody waits long.
// With CLUSTER > 1, so many neighbouring tiles are worked on in step, and x is fetched once for them all. With ROW_PARTS > 1, so
// many thread blocks have a tile, each ROWS other rows of x, and weights are fetched once for them all.
//
// Programmatic dependent launch: weights are asked for before the kernel in front has ended, everything else after it.
//
// To be defined: ROWS (of x at most, of a thread block; a multiple of 8, of 16 for OUTPUTS == 64), OUTPUTS (64: the warp
// groups share the rows; 128: the outputs), CLUSTER, SPLITS, ROW_PARTS (1 with CLUSTER > 1), STAGES, GATED (gate and up rows of a
// gated MLP: half a tile is of each, and silu(gate) * up is stored), HAS_BIAS, and MULTIPLY of the rows of a warp group.

#include "products.cuh"

constexpr int GROUP_ROWS = OUTPUTS == 64 ? ROWS / 2 : ROWS;
constexpr int WEIGHT_BYTES = OUTPUTS * DEPTH * 2, X_BYTES = ROWS * DEPTH * 2, STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr int SUMS = GROUP_ROWS / 2;               // of a thread
constexpr int EIGHTS = GROUP_ROWS / 8;             // a thread has 4 sums of each 8 rows: 2 rows, outputs n and n + 8
constexpr int PITCH = OUTPUTS * 2 + 16;            // of a row that waits to be stored: no two threads meet in a bank
constexpr int STORERS = OUTPUTS == 64 ? 128 : 256; // threads that store the same rows
constexpr int COLUMNS = GATED ? OUTPUTS / 2 : OUTPUTS;
constexpr int SHARERS = CLUSTER * ROW_PARTS;       // thread blocks that fetch for each other
constexpr int BOX_ROWS = (ROWS / CLUSTER + 7) / 8 * 8;  // of x, that each of them fetches; the last ones' may overlap
constexpr int FETCHED_BYTES = WEIGHT_BYTES + CLUSTER * BOX_ROWS * DEPTH * 2;

// Of the 16 outputs of a tile that a warp has.
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

// Rows that wait in shared memory, to `out` from `row` on.
__device__ __forceinline__ void store_rows(u32 waiting, bf16* out, int row, int num_rows, int column, int M, int N) {
    constexpr int PIECES = COLUMNS / 8;  // of 16 bytes
    const int pieces = min(num_rows, M - row) * PIECES;
    for (int piece = threadIdx.x % STORERS; piece < pieces; piece += STORERS) {
        int m = piece / PIECES, n = piece % PIECES * 8;
        if (column + n >= N) continue;
        uint4 values, up;
        u32 from = waiting + m * PITCH + n * 2;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(from) : "memory");
        if (GATED) {
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(up.x), "=r"(up.y), "=r"(up.z), "=r"(up.w) : "r"(from + COLUMNS * 2) : "memory");
            values = make_uint4(gated(values.x, up.x), gated(values.y, up.y), gated(values.z, up.z), gated(values.w, up.w));
        }
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out + (long long)(row + m) * N + column + n),
                     "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w) : "memory");  // plainly written, it may be 4 stores
    }
}

// Round 8 rows of sums and let them wait, rows and outputs exchanged.
__device__ __forceinline__ void put_eight(u32 waiting, float a, float b, float c, float d) {
    int lane = threadIdx.x & 31;
    u32 to = waiting + (lane & 7) * PITCH + (first_output() + (lane >> 3 & 1) * 8) * 2;
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(to), "r"(rounded(a, b)), "r"(rounded(c, d)) : "memory");
}

// A whole tile's sums to `out` from `first_row` on, AT_ONCE * 8 rows at a time.
template <int AT_ONCE> __device__ __forceinline__ void store_sums(float (&sums)[SUMS], u32 waiting, bf16* out, const bf16* bias, int first_row, int column,
                                           int M, int N) {
    int group = threadIdx.x >> 7, row = first_row + (OUTPUTS == 64 ? group * GROUP_ROWS : 0), id = OUTPUTS == 64 ? 2 + group : 1;
    if (OUTPUTS == 64) waiting += group * AT_ONCE * 8 * PITCH;
    float2 bias_of = biases(bias, column, N);
    #pragma unroll
    for (int eight = 0; eight < EIGHTS; eight += AT_ONCE) {
        const int count = EIGHTS - eight < AT_ONCE ? EIGHTS - eight : AT_ONCE;
        if (row + eight * 8 >= M) continue;
        sync<STORERS>(id);
        #pragma unroll
        for (int j = 0; j < count; j++) {
            const int i = 4 * (eight + j);
            put_eight(waiting + j * 8 * PITCH, sums[i] + bias_of.x, sums[i + 1] + bias_of.x, sums[i + 2] + bias_of.y,
                      sums[i + 3] + bias_of.y);
        }
        sync<STORERS>(id);
        store_rows(waiting, out, row + eight * 8, count * 8, column, M, N);
    }
}

// Of a thread block's EIGHTS, the first that the one with part `split` of the inputs adds up, and how many it does at most.
__device__ __forceinline__ int first_eight(int split) { return EIGHTS * split / SPLITS; }
constexpr int MOST = (EIGHTS + SPLITS - 1) / SPLITS;

// SPLITS thread blocks' sums of the same rows, each of other inputs, to `out`: each adds up a part of the rows.
__device__ __forceinline__ void store_shared_sums(float (&sums)[SUMS], u32 ring, u32 summed, bf16* out, const bf16* bias, int first_row,
                                                  int column, int split, int row_part, int M, int N) {
    int thread = threadIdx.x, group = thread >> 7;
    u32 mine = ring + thread * 16, there[SPLITS], barrier[SPLITS];  // [SPLITS][MOST][CONSUMERS] of 4 sums
    #pragma unroll
    for (int to = 0; to < SPLITS; to++) {
        int block = to * ROW_PARTS + row_part;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there[to]) : "r"(mine + split * MOST * CONSUMERS * 16), "r"(block));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier[to]) : "r"(summed), "r"(block));
    }
    cluster_sync();  // everybody has read its stages, which the sums are written over
    #pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        const int to = ((j + 1) * SPLITS - 1) / EIGHTS;  // whose first_eight is the last up to j
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(there[to] + (j - EIGHTS * to / SPLITS) * CONSUMERS * 16), "f"(sums[4 * j]), "f"(sums[4 * j + 1]),
                       "f"(sums[4 * j + 2]), "f"(sums[4 * j + 3]), "r"(barrier[to]) : "memory");
    }
    barrier_wait(summed, 0);
    int begin = first_eight(split), count = first_eight(split + 1) - begin;
    u32 waiting = ring + SPLITS * MOST * CONSUMERS * 16 + (OUTPUTS == 64 ? group * MOST * 8 * PITCH : 0);
    float2 bias_of = biases(bias, column, N);
    for (int j = 0; j < count; j++) {
        float a = bias_of.x, b = bias_of.x, c = bias_of.y, d = bias_of.y;
        #pragma unroll
        for (int from = 0; from < SPLITS; from++) {
            float4 part;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                         : "r"(mine + (from * MOST + j) * CONSUMERS * 16) : "memory");
            a += part.x; b += part.y; c += part.z; d += part.w;
        }
        put_eight(waiting + j * 8 * PITCH, a, b, c, d);
    }
    sync<STORERS>(OUTPUTS == 64 ? 2 + group : 1);
    store_rows(waiting, out, first_row + (OUTPUTS == 64 ? group * GROUP_ROWS : 0) + begin * 8, count * 8, column, M, N);
}

// Where a part begins, of `total` steps cut into equal ones.
__device__ __forceinline__ int part_begin(int total, int part, int parts) { return (int)((long long)total * part / parts); }

// weight [N, K], or [2 N, K] where GATED; x [M, K]; out [M, N]; bias as weight has rows. parts: float32 [thread blocks, SUMS / 4, 256, 4].
// arrived: [thread blocks], 0 before and after. K is a multiple of 64, N of 8. Thread blocks: a multiple of SHARERS * SPLITS;
// with SPLITS, as many as tiles times ROW_PARTS * SPLITS.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
product(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map, bf16* __restrict__ out,
        const bf16* __restrict__ bias, float4* __restrict__ parts, int* __restrict__ arrived, int M, int N, int K) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u, waiting = ring + STAGES * STAGE_BYTES;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, summed = empty + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    u32 rank = 0;
    if (SHARERS * SPLITS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int cluster = blockIdx.x / (SHARERS * SPLITS), num_clusters = gridDim.x / (SHARERS * SPLITS);
    const u32 sharer = SHARERS > 1 ? rank % SHARERS : 0, split = rank / SHARERS, first_sharer = rank - sharer;
    const int row_part = ROW_PARTS > 1 ? sharer : 0, first_row = row_part * ROWS;
    const int depth = K / DEPTH, total = (N + COLUMNS * CLUSTER - 1) / (COLUMNS * CLUSTER) * depth;
    int begin = part_begin(total, cluster, num_clusters), end = part_begin(total, cluster + 1, num_clusters);
    if (SPLITS > 1) {
        begin = cluster * depth + depth * split / SPLITS;
        end = cluster * depth + depth * (split + 1) / SPLITS;
    }
    auto column_of = [&](int tile) { return (tile * CLUSTER + (CLUSTER > 1 ? sharer : 0)) * COLUMNS; };

    if (thread == CONSUMERS) {
        fetch_map(&weight_map);
        fetch_map(&x_map);
    }
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32 * SHARERS);
        }
        barrier_init(summed, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (SPLITS > 1) barrier_expect(summed, SPLITS * (first_eight(split + 1) - first_eight(split)) * CONSUMERS * 16);
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    if (warp == CONSUMERS / 32) {
        const short sharers = ((1 << SHARERS) - 1) << first_sharer;
        // Weights are read once and leave the L2 cache first, x is read by all and stays.
        auto fetch_part = [&](u32 to, int k, int column, u32 barrier) {
            constexpr int PART = COLUMNS / ROW_PARTS;
            if (ROW_PARTS == 1)
                fetch(to, &weight_map, k * DEPTH, column, barrier, EVICT_FIRST);
            else
                fetch_for(sharers, to + row_part * PART * 128, &weight_map, k * DEPTH, column + row_part * PART, barrier, EVICT_FIRST);
        };
        auto fetch_weights = [&](int tile, int k, int s) {
            u32 to = ring + s * STAGE_BYTES, barrier = full + 8 * s;
            barrier_expect(barrier, FETCHED_BYTES);
            fetch_part(to, k, column_of(tile), barrier);
            if (GATED) fetch_part(to + WEIGHT_BYTES / 2, k, N + column_of(tile), barrier);
        };
        auto fetch_x = [&](int k, int s) {
            u32 to = ring + s * STAGE_BYTES + WEIGHT_BYTES, barrier = full + 8 * s;
            const int row = min((int)rank * BOX_ROWS, ROWS - BOX_ROWS);
            if (CLUSTER == 1)
                fetch(to, &x_map, k * DEPTH, first_row, barrier, EVICT_LAST);
            else
                fetch_for(sharers, to + row * DEPTH * 2, &x_map, k * DEPTH, row, barrier, EVICT_LAST);
        };
        const int ahead = min(STAGES, end - begin);
        int tile = begin / depth, k = begin % depth, x_k = k;
        if (ROW_PARTS > 1) cluster_sync();  // the others' barriers are ready
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
        if (SPLITS > 1) cluster_sync();  // of store_shared_sums
    } else {
        if (SHARERS > 1) cluster_sync();
        const int group = warp >> 2;
        const u32 weight_offset = OUTPUTS == 128 ? group * 64 * 128 : 0, x_offset = OUTPUTS == 64 ? group * GROUP_ROWS * 128 : 0;
        int s = 0, parity = 0, given_back = begin;
        auto give_back_last = [&] {  // if it is filled again: who is arrived at waits for that, and has not ended
            const u32 last = empty + 8 * (s == 0 ? STAGES - 1 : s - 1);
            if (given_back++ < end - STAGES && lane < SHARERS) SHARERS == 1 ? barrier_arrive(last) : barrier_arrive(last, first_sharer + lane);
        };
        float sums[SUMS];
        for (int step = begin; step < end;) {
            const int tile = step / depth, first = step % depth, last = min(depth, first + end - step);
            step += last - first;
            for (int k = first; k < last; k++) {
                barrier_wait(full + 8 * s, parity);
                const u64 weights = descriptor(ring + s * STAGE_BYTES + weight_offset);
                const u64 rows = descriptor(ring + s * STAGE_BYTES + WEIGHT_BYTES + x_offset);
                multiply_stage(sums, weights, rows, k > first);
                multiplied_but<1>();
                if (k > first) give_back_last();  // its product is done
                if (++s == STAGES) { s = 0; parity ^= 1; }
            }
            all_multiplied(sums);
            give_back_last();
            previous_kernel_wait();
            if (SPLITS > 1) {
                store_shared_sums(sums, ring, summed, out, bias, first_row, column_of(tile), split, row_part, M, N);
                break;
            }
            if (first > 0) {  // another one's tile
                float4* to = parts + (long long)blockIdx.x * (SUMS / 4) * CONSUMERS + thread;
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
                    int there, *flag = arrived + (cluster + 1 + thread) * SHARERS + sharer;
                    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory"); while (!there);
                    *flag = 0;  // for the next product
                }
                sync<CONSUMERS>(1);
                for (int other = 1; other <= others; other++) {
                    const float4* from = parts + (long long)((cluster + other) * SHARERS + sharer) * (SUMS / 4) * CONSUMERS + thread;
                    #pragma unroll
                    for (int i = 0; i < SUMS; i += 4) {
                        float4 part = __ldcg(from + i / 4 * CONSUMERS);
                        sums[i] += part.x; sums[i + 1] += part.y; sums[i + 2] += part.z; sums[i + 3] += part.w;
                    }
                }
            }
            if (EIGHTS <= 4 || step < end)
                store_sums<4>(sums, waiting, out, bias, first_row, column_of(tile), M, N);
            else {  // nothing is fetched any more
                sync<CONSUMERS>(1);  // nor read
                store_sums<EIGHTS>(sums, ring, out, bias, first_row, column_of(tile), M, N);
            }
        }
    }
    if (SHARERS > 1 && SPLITS == 1) cluster_sync();  // what is fetched for others has come before who fetches it ends
}
