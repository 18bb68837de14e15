// Split-KV decode attention over the paged KV pool, for Hopper: one query per request, up to 8 query heads per KV head. It is
// limited by memory bandwidth. The file is long because all of it is one kernel, whose producer and consumers share its state.
//
// The key tiles (64 keys) of a batch are split into partitions of equal length, regardless of request boundaries, as in
// Stream-K GEMMs (arXiv 2301.03598). A thread block has one partition of one KV head, and each SM holds two thread blocks.
// A producer warp keeps a ring of tiles filled by TMA, without a pause between requests. Four consumer warps attend to 16 keys
// of a tile each. They have accumulators of their own, which are merged where a request ends in the partition.
//
// A request in several partitions is merged by its log-sum-exps (Flash-Decoding, pytorch.org/blog/flash-decoding), in the
// partition in which it begins. The later partitions start with that request, so their partial outputs are ready by then.
// There are no flags or fences: a word's value tells if it has arrived, as in TensorRT-LLM's "Lamport" all-reduce
// (github.com/NVIDIA/TensorRT-LLM).
//
// The GEMMs are transposed, keys @ queries and then values^T @ weights: the mma instruction has 16 rows but only 8 columns, and a
// KV head has few queries. Softmax is computed online over the tiles (arXiv 2205.14135).
//
// With ROPE, q and this step's k are the output of the QKV GEMM. The kernel normalizes (with NORM) and rotates them, and
// stores k and v. The last key of a request is then written into its tile in shared memory, which was loaded without it.
//
// PDL: lengths, page table, and K and V of earlier steps are read before the previous kernel has ended. Queries are read after
// it and, without ROPE, also the tiles with this step's keys, which the previous kernel stores.
//
// Pointers to what the previous kernel writes are not __restrict__: the compiler would use non-coherent loads (ld.global.nc),
// which may return stale data.
//
// With FP8, the pool has float8 e4m3, which is converted to float16 in registers. Queries are divided by their largest magnitude, since
// bfloat16 exceeds the range of float16. A word of K holds four dimensions of a key, and one of V two dimensions of two keys. So
// fragments have their dimensions in another order, which queries and the output follow.
//
// Macros: GROUP (query heads per KV head, 1 to 8), DIM (64 or 128), PAGE (tokens per page: 8, 16, 32 or a multiple of 64),
// STAGES, ROPE, NORM and FP8 (0 or 1; FP8 needs DIM == 128 and no ROPE).

#include "common.cuh"
#include "decode_fragments.cuh"
#include "decode_rope.cuh"
#include "split_kv_exchange.cuh"

constexpr int KEYS = 64, KEYS_PER_WARP = 16, CONSUMERS = 128, MIN_TILES = 2;
constexpr int LINES = DIM / 64 / (1 + FP8);       // lines of 128 bytes per key, the width of the swizzle
constexpr int STEPS = LINES * 4;                  // of 32 bytes per key, what load_matrix reads
constexpr int TILE_BYTES = KEYS * LINES * 128, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int UNIT = PAGE < KEYS ? PAGE : KEYS;   // keys that are contiguous in memory, the box of full tiles
constexpr int UNITS = KEYS / UNIT;                // per tile
constexpr int SMALL_BOX = 8;                      // keys per box of a request's last tile, if it is not full
constexpr int PITCH = DIM + 4;                    // floats per head's partial output, without bank conflicts in a warp

// K and V are read once per step. With evict_first, they leave the L2 cache before data that is read again.
__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int line, int token, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(line), "r"(token), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}

// Start of a partition, equal in all layers of a step. In memory, the pages of its first 32 units follow it, and then the
// lengths and page-table rows of its first 32 requests.
struct alignas(32) PartitionStart {
    int index, size;                // index of the partition, or negative if it is empty; tiles per partition
    int tile, last;                 // range of the batch's tiles, `last` exclusive
    int request, first;             // request of the first tile, and that request's first tile
};
constexpr int START_WORDS = 128;    // including the arrays that follow

// Descriptor of the tile in a stage.
struct alignas(16) Tile {
    int request, keys;              // `keys` is the number of valid keys; 0 after the last tile
    int next;                       // next request of the partition, or -1
    int num_later;                  // partitions of the request after the one in which it begins
    int partition;
    bool is_later;                  // this partition is not the request's first
    bool begins, ends;              // first or last tile of the request in this partition
    bool is_last;                   // last tile of the request
};

// Arguments:
// - q: [requests, heads * GROUP, DIM]; out: like q, contiguous.
// - Tensor maps: K and V as [tokens, heads * LINES, elements of a line]; a box is one head's lines of UNIT or of SMALL_BOX tokens.
// - partials: partial outputs of each partition for a request that begins before it, [partitions, heads, GROUP, DIM + 4]; all
//   words are EMPTY before and after the kernel.
// - scale: factor on the scores, times log2(e), since exponentials are to base 2. v_scale: factor on the output.
// - k, v: [requests, heads, DIM]; cos, sin: [requests, DIM / 2]; q_weight, k_weight: [DIM] (NORM); k_pages, v_pages: [tokens,
//   heads, DIM]; slots: slot of each request's token. These are for ROPE only.
// - starts: [partitions, START_WORDS], computed by a step's first layer and read by the others, since computing them takes
//   several dependent loads.
// Thread blocks: heads times partitions. Blocks with work come first, and later partitions come before earlier ones. So no block
// waits for a block that has not started.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)
decode(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
       const __grid_constant__ TensorMap k_small_map, const __grid_constant__ TensorMap v_small_map,
       const bf16* q, const int* __restrict__ page_table, const int* __restrict__ rows,
       const int* __restrict__ seq_lens, bf16* __restrict__ out, u32* partials, float scale, float v_scale, int num_requests, int heads,
       int row_stride, int q_stride_t, int q_stride_h, const bf16* k, const bf16* v, int k_stride_t, int k_stride_h,
       int v_stride_t, int v_stride_h, const bf16* cos, const bf16* sin, const bf16* __restrict__ q_weight,
       const bf16* __restrict__ k_weight, float eps, bf16* k_pages, bf16* v_pages, const long long* slots,
       int* starts, int computes_starts) {
    extern __shared__ __align__(1024) char memory[];
    char* const after_ring = memory + STAGES * STAGE_BYTES;
    float* const sums = (float*)after_ring;                              // [4 warps, GROUP, PITCH]
    float2* const stats = (float2*)(sums + 4 * GROUP * PITCH);           // [4 warps, GROUP]: maximum score, sum of weights
    Tile* const tiles = (Tile*)(stats + 4 * GROUP);                      // [STAGES]
    u64* const barriers = (u64*)(tiles + STAGES);
    const u32 ring = shared_address(memory), full = shared_address(barriers), empty = full + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int head = blockIdx.x % heads, num_partitions = gridDim.x / heads;

    if (thread == CONSUMERS) {
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        prefetch_map(&k_small_map);
        prefetch_map(&v_small_map);
    }
    if (thread == 0) {
        if (ring & 1023) __trap();
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    // The layers that read `starts` begin after the first layer's kernel, which computes them, has ended. No kernel of the last
    // step still reads its `starts` when they are overwritten: kernels between two steps (sampling) wait for all earlier ones.
    if (!computes_starts) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    if (warp == CONSUMERS / 32) {
        // Pages of 32 units of a request, from `unit` on, one per thread.
        auto pages_of = [&](int row, int length, int unit) {
            int page = (unit + lane) * UNIT / PAGE;
            return page * PAGE < length ? page_table[(long long)row * row_stride + page] : 0;
        };
        int length_of = 0, row_of = 0;  // length and page-table row of 32 requests, one per thread
        auto look_up = [&](int request) {
            int index = min(request + lane, num_requests - 1);
            length_of = seq_lens[index];
            row_of = rows[index];
        };
        PartitionStart partition;
        int* const record = starts + blockIdx.x / heads * START_WORDS;
        int next_pages = 0;
        if (computes_starts) {
            // Each thread counts the tiles of a part of the requests; a warp scan follows.
            const int each = (num_requests + 31) / 32;
            auto tiles_of = [&](int request) {
                return request < num_requests ? (seq_lens[request] + KEYS - 1) / KEYS : 0;
            };
            int own = 0;
            for (int i = 0; i < each; i++) own += tiles_of(lane * each + i);
            int own_end = own;
            for (int i = 1; i < 32; i *= 2) {
                int earlier = __shfl_up_sync(ALL, own_end, i);
                if (lane >= i) own_end += earlier;
            }
            const int num_tiles = __shfl_sync(ALL, own_end, 31);
            partition.size = max((num_tiles + num_partitions - 1) / num_partitions, MIN_TILES);
            partition.index = (num_tiles + partition.size - 1) / partition.size - 1 - blockIdx.x / heads;
            partition.tile = max(partition.index * partition.size, 0);
            partition.last = partition.index < 0 ? 0 : min(partition.tile + partition.size, num_tiles);
            int request = lane * each, first = own_end - own;
            const bool is_owner = first <= partition.tile && partition.tile < own_end;
            if (is_owner)
                for (int count; first + (count = tiles_of(request)) <= partition.tile; request++) first += count;
            const int owner = __ffs(__ballot_sync(ALL, is_owner)) - 1;
            partition.request = __shfl_sync(ALL, request, owner);
            partition.first = __shfl_sync(ALL, first, owner);
            look_up(partition.request);
            next_pages = pages_of(__shfl_sync(ALL, row_of, 0), __shfl_sync(ALL, length_of, 0), (partition.tile - partition.first) * UNITS & ~31);
            if (head == 0) {
                if (lane == 0) *(PartitionStart*)record = partition;
                record[32 + lane] = next_pages;
                record[64 + lane] = length_of;
                record[96 + lane] = row_of;
                __threadfence();
            }
        } else {
            partition = *(const PartitionStart*)record;
            next_pages = record[32 + lane];
            length_of = record[64 + lane];
            row_of = record[96 + lane];
        }
        int tile = partition.tile, request = partition.request, first = partition.first;
        const int size = partition.size, last = partition.last;
        bool has_waited = false;
        int s = 0, parity = 1;  // waiting for the parity of the phase before the first returns at once: all stages are empty
        if (partition.index >= 0) {
            int first_loaded = request;  // first request of length_of and row_of
            int pages = 0, unit = -1, next_request = request, next_unit = (tile - first) * UNITS & ~31;
            while (tile < last) {
                if (request - first_loaded == 32) {
                    first_loaded = request;
                    look_up(first_loaded);
                }
                const int length = __shfl_sync(ALL, length_of, request - first_loaded), row = __shfl_sync(ALL, row_of, request - first_loaded);
                const int count = (length + KEYS - 1) / KEYS, after = first + count, until = min(after, last);
                const int first_partition = first / size, last_partition = (after - 1) / size;
                unit = -1;
                for (const int from = tile; tile < until; tile++) {
                    const int offset = tile - first, keys = min(KEYS, length - offset * KEYS);
                    if (unit < 0 || offset * UNITS >= unit + 32) {
                        unit = offset * UNITS & ~31;
                        pages = next_request == request && next_unit == unit ? next_pages : pages_of(row, length, unit);
                        // Prefetch the next 32 pages.
                        next_request = request;
                        next_unit = unit + 32;
                        if (next_unit < (until - first) * UNITS) {
                            next_pages = pages_of(row, length, next_unit);
                        } else if (until < last && request + 1 - first_loaded < 32) {
                            const int next_length = __shfl_sync(ALL, length_of, request + 1 - first_loaded);
                            const int next_row = __shfl_sync(ALL, row_of, request + 1 - first_loaded);
                            next_request = request + 1;
                            next_unit = 0;
                            next_pages = pages_of(next_row, next_length, 0);
                        }
                    }
                    if (!ROPE && offset == count - 1 && !has_waited) {
                        previous_kernel_wait();  // it stores this step's key
                        has_waited = true;
                    }
                    barrier_wait(empty + 8 * s, parity);
                    const int box = keys == KEYS ? UNIT : SMALL_BOX, copies = (keys + box - 1) / box * 2;
                    const u32 barrier = full + 8 * s;
                    if (lane == 0) {
                        tiles[s] = Tile{request, keys, until < last ? request + 1 : -1, last_partition - first_partition, partition.index, partition.index > first_partition, tile == from, tile == until - 1, offset == count - 1};
                        barrier_expect(barrier, copies * box * LINES * 128);
                    }
                    __syncwarp();
                    const int is_v = lane & 1, key = (lane >> 1) * box;
                    const int page = __shfl_sync(ALL, pages, (offset * UNITS + key / UNIT - unit) & 31);
                    if (lane < copies) {
                        const u32 to = ring + s * STAGE_BYTES + is_v * TILE_BYTES + key * LINES * 128;
                        const TensorMap* map = keys == KEYS ? (is_v ? &v_map : &k_map) : (is_v ? &v_small_map : &k_small_map);
                        fetch(to, map, head * LINES, page * PAGE + (offset * KEYS + key) % PAGE, barrier);
                    }
                    if (++s == STAGES) { s = 0; parity ^= 1; }
                }
                first = after;
                request++;
            }
        }
        if (!has_waited) previous_kernel_wait();
        barrier_wait(empty + 8 * s, parity);
        if (lane == 0) {
            tiles[s].keys = 0;
            barrier_arrive(full + 8 * s);
        }
        return;
    }

    const int row = lane >> 2, pair = lane & 3;  // the thread's row and pair of columns of an 8 x 8 fragment
    previous_kernel_wait();
    u32 queries[DIM / 8], next_queries[DIM / 8];
    auto load_queries = [&](u32 (&to)[DIM / 8], int request) {
        const bf16* from = q + (long long)request * q_stride_t + (long long)(head * GROUP + row) * q_stride_h + pair * (FP8 ? 4 : 2);
        #pragma unroll
        for (int i = 0; i < DIM / 8; i++) to[i] = row < GROUP ? *(const u32*)(from + (FP8 ? i / 2 * 16 + i % 2 * 2 : i * 8)) : 0;
    };
    float query_scales[2] = {scale, scale};  // factor on the scores of queries 2 * pair and 2 * pair + 1
    auto convert_queries = [&] {             // to float16
        float largest = 1e-30f;
        #pragma unroll
        for (int i = 0; i < DIM / 8; i++) {
            const float2 x = unpack_bf16(queries[i]);
            largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
        }
        for (int i = 1; i < 4; i *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, i));
        const float inverse = 1.f / largest;
        #pragma unroll
        for (int i = 0; i < DIM / 8; i++) {
            const float2 x = unpack_bf16(queries[i]);
            queries[i] = pack_half(x.x * inverse, x.y * inverse);
        }
        for (int j = 0; j < 2; j++) query_scales[j] = scale * __shfl_sync(ALL, largest, (2 * pair + j) * 4);
    };
    auto rope_queries = [&](int request) {
        const bf16 *c = cos + (long long)request * (DIM / 2) + pair * 2, *s = sin + (long long)request * (DIM / 2) + pair * 2, *norm_weight = q_weight + pair * 2;
        float squares = 0.f;
        #pragma unroll
        for (int i = 0; i < DIM / 8; i++) squares += sum_of_squares(queries[i]);
        for (int i = 1; i < 4; i *= 2) squares += __shfl_xor_sync(ALL, squares, i);
        const float normal = NORM ? rsqrtf(squares / DIM + eps) : 1.f;
        #pragma unroll
        for (int i = 0; i < DIM / 16; i++)
            apply_rope(queries[i], queries[i + DIM / 16], normal, NORM ? load_pair(norm_weight + i * 8) : 0, NORM ? load_pair(norm_weight + i * 8 + DIM / 2) : 0, load_pair(c + i * 8), load_pair(s + i * 8));
    };
    // Write this step's key and value of a request to the pool, and to the tile at `to` as its key `key`.
    auto add_key = [&](int request, u32 to, int key) {
        const bool has_dims = lane < DIM / 4;
        const int d = has_dims ? 2 * lane : 0;
        const bf16 *k_from = k + (long long)request * k_stride_t + head * k_stride_h + d, *v_from = v + (long long)request * v_stride_t + head * v_stride_h + d;
        u32 halves[2][2] = {{load_pair(k_from), load_pair(k_from + DIM / 2)}, {load_pair(v_from), load_pair(v_from + DIM / 2)}};
        const u32 c = load_pair(cos + (long long)request * (DIM / 2) + d), s = load_pair(sin + (long long)request * (DIM / 2) + d);
        const u32 weight_pair[2] = {NORM ? load_pair(k_weight + d) : 0, NORM ? load_pair(k_weight + d + DIM / 2) : 0};
        const long long slot = slots[request];
        float squares = has_dims ? sum_of_squares(halves[0][0]) + sum_of_squares(halves[0][1]) : 0.f;
        for (int i = 1; i < 32; i *= 2) squares += __shfl_xor_sync(ALL, squares, i);
        apply_rope(halves[0][0], halves[0][1], NORM ? rsqrtf(squares / DIM + eps) : 1.f, weight_pair[0], weight_pair[1], c, s);
        if (has_dims) {
            #pragma unroll
            for (int is_v = 0; is_v < 2; is_v++)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int dim = d + half * (DIM / 2), line = dim / 64;
                    *(u32*)((is_v ? v_pages : k_pages) + (slot * heads + head) * DIM + dim) = halves[is_v][half];
                    const u32 at = to + is_v * TILE_BYTES + (key * LINES + line) * 128 + ((dim % 64 / 8 ^ key * LINES & 7 ^ line) << 4) + dim % 8 * 2;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(halves[is_v][half]) : "memory");
                }
            // TMA overwrites this shared memory next.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
    };
    float acc[DIM / 16][4], max_score[2], weight_sum[2];
    bool is_first = true;
    // Rows and 16-byte chunks of a warp's fragments. The swizzle permutes a line's chunks by XOR with the line's index modulo 8.
    const int k_row = warp * KEYS_PER_WARP + (lane & 15), k_chunk = lane >> 4;
    const int v_row = warp * KEYS_PER_WARP + (lane & 7) + (lane >> 4) * 8, v_chunk = lane >> 3 & 1;
    for (int s = 0, parity = 0;;) {
        barrier_wait(full + 8 * s, parity);
        const Tile tile = tiles[s];
        if (tile.keys == 0) return;
        if (tile.begins) {
            if (is_first) {
                load_queries(queries, tile.request);
            } else {
                #pragma unroll
                for (int i = 0; i < DIM / 8; i++) queries[i] = next_queries[i];
            }
            is_first = false;
            if (tile.next >= 0) load_queries(next_queries, tile.next);
            if (ROPE) rope_queries(tile.request);
            if (FP8) convert_queries();
            max_score[0] = max_score[1] = -__int_as_float(0x7F800000);
            weight_sum[0] = weight_sum[1] = 0.f;
            #pragma unroll
            for (int i = 0; i < DIM / 16; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] = 0.f;
        }
        const int keys = tile.keys - warp * KEYS_PER_WARP;  // valid keys of this warp
        if (ROPE && tile.is_last && 0 < keys && keys <= KEYS_PER_WARP) add_key(tile.request, ring + s * STAGE_BYTES, tile.keys - 1);
        if (keys > 0) {
            const u32 k_at = ring + s * STAGE_BYTES + k_row * LINES * 128, v_at = ring + s * STAGE_BYTES + TILE_BYTES + v_row * LINES * 128;
            float scores[2][4] = {};
            #pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const Matrix k = load_matrix(k_at + i / 4 * 128 + ((i % 4 * 2 + k_chunk ^ k_row * LINES & 7 ^ i / 4) << 4));
                if (FP8) {
                    mma(scores[0], Matrix{lower_pair(k.a), lower_pair(k.b), upper_pair(k.a), upper_pair(k.b)}, queries[4 * i], queries[4 * i + 1]);
                    mma(scores[1], Matrix{lower_pair(k.c), lower_pair(k.d), upper_pair(k.c), upper_pair(k.d)}, queries[4 * i + 2], queries[4 * i + 3]);
                } else {
                    mma(scores[i & 1], k, queries[2 * i], queries[2 * i + 1]);
                }
            }
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[0][j] = (scores[0][j] + scores[1][j]) * query_scales[j & 1];
                if (row + (j >> 1) * 8 >= keys) scores[0][j] = -__int_as_float(0x7F800000);
            }
            float weights[4], rescale[2];
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const float new_max = fmaxf(max_score[j], max_over_keys(fmaxf(scores[0][j], scores[0][j + 2])));
                rescale[j] = exp2_approx(max_score[j] - new_max);
                weights[j] = exp2_approx(scores[0][j] - new_max);
                weights[j + 2] = exp2_approx(scores[0][j + 2] - new_max);
                max_score[j] = new_max;
                weight_sum[j] = weight_sum[j] * rescale[j] + weights[j] + weights[j + 2];
            }
            if (__any_sync(ALL, rescale[0] != 1.f || rescale[1] != 1.f)) {
                #pragma unroll
                for (int i = 0; i < DIM / 16; i++)
                    #pragma unroll
                    for (int j = 0; j < 4; j++) acc[i][j] *= rescale[j & 1];
            }
            auto pack = [](float first, float second) { return FP8 ? pack_half(first, second) : pack_bf16(first, second); };
            const u32 low = transposed(pack(weights[0], weights[1])), high = transposed(pack(weights[2], weights[3]));
            // Values past the request's last key may be anything, including NaN, and 0 * NaN is NaN.
            auto inside = [&](int key) { return (key < keys ? 0xFFFFu : 0u) | (key + 1 < keys ? 0xFFFF0000u : 0u); };
            const u32 low_inside = inside(pair * 2), high_inside = inside(pair * 2 + 8);
            auto add_values = [&](float (&to)[4], Matrix v) {
                v.a &= low_inside;
                v.b &= low_inside;
                v.c &= high_inside;
                v.d &= high_inside;
                mma(to, v, low, high);
            };
            #pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const Matrix v = load_matrix_transposed(v_at + i / 4 * 128 + ((i % 4 * 2 + v_chunk ^ v_row * LINES & 7 ^ i / 4) << 4));
                if (FP8) {
                    add_values(acc[2 * i], Matrix{even_pair(v.a), odd_pair(v.a), even_pair(v.c), odd_pair(v.c)});
                    add_values(acc[2 * i + 1], Matrix{even_pair(v.b), odd_pair(v.b), even_pair(v.d), odd_pair(v.d)});
                } else {
                    add_values(acc[i], v);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * s);
        if (++s == STAGES) { s = 0; parity ^= 1; }
        if (!tile.ends) continue;

        constexpr int QUADS = GROUP * DIM / 4, EACH = (QUADS + CONSUMERS - 1) / CONSUMERS;  // EACH: quads per thread
        constexpr int AT_ONCE = 5 / EACH;  // partial outputs whose loads are in flight together, about 5 quads per thread
        const long long pitch = (long long)heads * PARTIAL_WORDS;
        u32* const own = partials + tile.partition * pitch + head * PARTIAL_WORDS;
        auto is_own = [&](int j) { return thread + j * CONSUMERS < QUADS; };
        auto quad = [&](int j) { return min(thread + j * CONSUMERS, QUADS - 1) * 4; };
        int offset[EACH], lse_offset[EACH];  // in a partial output
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            offset[j] = quad(j) / DIM * (DIM + 4) + quad(j) % DIM;
            lse_offset[j] = quad(j) / DIM * (DIM + 4) + DIM;
        }
        const bool merges = !tile.is_later && tile.num_later > 0;
        auto partial_of = [&](int other) { return own + min(other, tile.num_later) * pitch; };
        auto load_partial = [&](Quad (&other_values)[EACH], float (&other_lse)[EACH], int other) {
            #pragma unroll
            for (int j = 0; j < EACH; j++) {
                other_values[j] = load_relaxed(partial_of(other) + offset[j]);
                other_lse[j] = load_relaxed_one(partial_of(other) + lse_offset[j]);
            }
        };
        auto has_all = [&](const Quad (&other_values)[EACH], const float (&other_lse)[EACH]) {
            bool all = true;
            #pragma unroll
            for (int j = 0; j < EACH; j++) all = all && (!is_own(j) || (has_arrived(other_values[j]) && has_arrived(other_lse[j])));
            return all;
        };
        Quad next[EACH];
        float next_lse[EACH];

        #pragma unroll
        for (int j = 0; j < 2; j++) {
            weight_sum[j] = sum_over_keys(weight_sum[j]);
            const int query = 2 * pair + j;
            if (query >= GROUP) continue;
            if (row == 0) stats[warp * GROUP + query] = make_float2(max_score[j], weight_sum[j]);
            float* to = sums + (warp * GROUP + query) * PITCH + row * (1 + FP8);
            #pragma unroll
            for (int i = 0; i < DIM / 16; i++) {
                to[i * 16] = acc[i][j];
                to[i * 16 + (FP8 ? 1 : 8)] = acc[i][j + 2];
            }
        }
        if (merges) load_partial(next, next_lse, 1);  // prefetch, before this partition's own output is complete
        sync<CONSUMERS>(1);
        Quad value[EACH];
        float lse[EACH];
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int query = quad(j) / DIM, dim = quad(j) % DIM;
            float2 of[4];
            #pragma unroll
            for (int w = 0; w < 4; w++) of[w] = stats[w * GROUP + query];
            const float largest = fmaxf(fmaxf(of[0].x, of[1].x), fmaxf(of[2].x, of[3].x));
            Quad sum = {};
            float weight = 0.f;
            #pragma unroll
            for (int w = 0; w < 4; w++) {
                const float factor = exp2_approx(of[w].x - largest);
                const Quad part = *(const Quad*)(sums + (w * GROUP + query) * PITCH + dim);
                weight += of[w].y * factor;
                sum.x += part.x * factor; sum.y += part.y * factor; sum.z += part.z * factor; sum.w += part.w * factor;
            }
            const float inverse = v_scale / weight;
            value[j] = Quad{sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
            lse[j] = largest + __log2f(weight);
        }
        sync<CONSUMERS>(1);  // all warps have read `sums`
        if (merges) {
            float weight[EACH];
            #pragma unroll
            for (int j = 0; j < EACH; j++) weight[j] = 1.f;
            auto merge = [&](const Quad (&other_values)[EACH], const float (&other_lse)[EACH], int other) {
                #pragma unroll
                for (int j = 0; j < EACH; j++) {
                    if (other > tile.num_later || !is_own(j)) continue;
                    const float largest = fmaxf(lse[j], other_lse[j]);
                    const float rescale = exp2_approx(lse[j] - largest), factor = exp2_approx(other_lse[j] - largest);
                    value[j].x = value[j].x * rescale + other_values[j].x * factor;
                    value[j].y = value[j].y * rescale + other_values[j].y * factor;
                    value[j].z = value[j].z * rescale + other_values[j].z * factor;
                    value[j].w = value[j].w * rescale + other_values[j].w * factor;
                    weight[j] = weight[j] * rescale + factor;
                    lse[j] = largest;
                    // Reset for the next layer: all threads of this query, which are in one warp, have read the words.
                    store_relaxed(partial_of(other) + offset[j], EMPTY, EMPTY, EMPTY, EMPTY);
                    store_relaxed_one(partial_of(other) + lse_offset[j], EMPTY);
                }
            };
            while (__any_sync(ALL, !has_all(next, next_lse))) load_partial(next, next_lse, 1);
            merge(next, next_lse, 1);
            for (int other = 2; other <= tile.num_later; other += AT_ONCE) {
                Quad other_values[AT_ONCE][EACH];
                float other_lse[AT_ONCE][EACH];
                bool all;
                do {  // branch-free, so that all loads are in flight together
                    #pragma unroll
                    for (int a = 0; a < AT_ONCE; a++) load_partial(other_values[a], other_lse[a], other + a);
                    all = true;
                    #pragma unroll
                    for (int a = 0; a < AT_ONCE; a++) all = all && has_all(other_values[a], other_lse[a]);
                } while (__any_sync(ALL, !all));
                #pragma unroll
                for (int a = 0; a < AT_ONCE; a++) merge(other_values[a], other_lse[a], other + a);
            }
            #pragma unroll
            for (int j = 0; j < EACH; j++) {
                const float inverse = 1.f / weight[j];
                value[j].x *= inverse; value[j].y *= inverse; value[j].z *= inverse; value[j].w *= inverse;
            }
        }
        bf16* const to = out + ((long long)tile.request * heads + head) * GROUP * DIM;
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (!is_own(j)) continue;
            if (!tile.is_later) {
                *(uint2*)(to + (thread + j * CONSUMERS) * 4) = make_uint2(pack_bf16(value[j].x, value[j].y), pack_bf16(value[j].z, value[j].w));
            } else {
                store_relaxed(own + offset[j], to_word(value[j].x), to_word(value[j].y), to_word(value[j].z), to_word(value[j].w));
                if (offset[j] + DIM == lse_offset[j]) store_relaxed_one(own + lse_offset[j], to_word(lse[j]));
            }
        }
    }
}
