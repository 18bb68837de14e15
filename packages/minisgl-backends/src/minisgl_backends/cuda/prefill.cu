// Prefill attention over the paged KV pool, for Hopper: causal, bfloat16, several queries per request.
// The pool is in bfloat16 or float8_e4m3fn.
//
// A tile has up to 128 rows: the queries of QUERIES tokens, each with the GROUP heads of a KV head, the head varying fastest. So K
// and V are read once for all heads of the group. The design is that of FlashAttention-3 (arXiv 2407.08608): two producer warps
// fill rings of K and V tiles by TMA. Two consumer warpgroups have 64 rows each. A warpgroup computes the softmax of one tile of keys
// while its tensor cores multiply the weights of the tile before with V. The warpgroups take turns to issue their wgmmas, so that
// one computes exponentials while the other multiplies.
//
// The grid is persistent. Blocks take tiles from a counter, those of a request with most keys first, and the producer loads the
// next tile's queries while the current one is computed.
//
// Keys are visited from the last to the first, so that the masked ones come first. The last keys are loaded in boxes of 8 tokens.
// Rows of V after the last key in its box are set to zero: unused slots of the pool may have NaNs, and a weight of 0 times NaN would
// be NaN.
//
// With FP8, four producer warps copy half a tile of K or V each to a buffer by cp.async, and convert it to float16, the dtype of
// both GEMMs. Converting two float8 numbers to float16 is one instruction, converting them to bfloat16 is five.
//
// Macros: GROUP (query heads per KV head, 1 to 64), DIM (64 or 128), PAGE (tokens per page: 8, 16, 32 or a multiple of 64), FP8 (the
// pool's dtype), EXTRAS (support for windows, soft caps and sinks), WGMMA (source of `wgmma` for both GEMMs, see prefill.py).

#include "common.cuh"
#include WGMMA

constexpr int ROWS = 128, KEYS = 128, STAGES = 2, CONSUMERS = 256;
constexpr int QUERIES = ROWS / GROUP;             // tokens per tile
constexpr int LINES = DIM / 64;                   // lines of 128 bytes per row, the width of the swizzle
constexpr int LINE_BYTES = 128 * 128;             // one line of all rows of a tile, of queries or keys
constexpr int TILE_BYTES = LINES * LINE_BYTES;
constexpr int QUERY_BYTES = LINES * QUERIES * GROUP * 128;
constexpr int UNIT = PAGE < 64 ? PAGE : 64;       // keys that are contiguous in memory, the box of full tiles
constexpr int SMALL_BOX = 8;                      // keys per box of a tile that is not full
constexpr int PRODUCERS = FP8 ? 4 : 2;            // warps
constexpr int PRODUCER_REGISTERS = FP8 ? 56 : 40, CONSUMER_REGISTERS = FP8 ? 224 : 232;
constexpr u32 ALL = 0xFFFFFFFF;

__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(EVICT_NORMAL) : "memory");
}
// wgmma descriptors of tiles with 128-byte swizzle, whose 8 rows are 1,024 bytes. `rows_of` is for K-major operands,
// queries and keys. `columns_of` is for V, which is MN-major: its lines are LINE_BYTES apart.
__device__ __forceinline__ u64 rows_of(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
__device__ __forceinline__ u64 columns_of(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | (u64)(LINE_BYTES >> 4) << 16 | 64ull << 32 | 1ull << 62; }
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void arrive_named(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(CONSUMERS) : "memory"); }
// Keep the operands of asynchronous wgmmas in registers: the compiler must assume that an empty asm statement changes them.
template <int COUNT> __device__ __forceinline__ void pin(float (&values)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {  // the dtype of both GEMMs
#if FP8
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return pack_bf16(low, high);
#endif
}
__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 chunk;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w) : "r"(at) : "memory");
    return chunk;
}
__device__ __forceinline__ void store_shared(u32 at, uint4 chunk) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w) : "memory");
}
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Tile of queries in a query buffer.
struct alignas(16) Tile {
    int token, queries;   // first token in the batch, number of tokens
    int position;         // position of the first token in its sequence
    int head, key_tiles;  // KV head; tiles of keys until the last query, or 0 after the last tile
    int row;              // of the page table
    int first;            // first tile of keys that is in any query's window; 0 without a window
    __device__ __forceinline__ int first_key_tile() const { return EXTRAS ? first : 0; }
};

#if FP8
constexpr float QUERY_SCALE = 1.f / 64;           // keeps queries in the range of float16
constexpr int CHUNKS = DIM / 16;                  // per key: 16 bytes
constexpr int COPIES = CHUNKS * KEYS / 2 / 32;    // chunks of half a tile per lane
constexpr int COPY_GROUP = 4;                     // chunks per lane that are waited for together

// Load the tiles of keys of a tile of queries, the last one first: half of each, by one warp. A lane converts the chunks that it has
// copied. The copies of a group for the next tile begin as soon as the group is converted. Keys after the last one are zeros.
__device__ __forceinline__
void load_tiles(const char* pages, const int* table, const Tile& tile, int heads, int half, u32 buffer, u32 ring, u32 full, u32 empty,
                int& stage, int& parity) {
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, first_key = half * (KEYS / 2) + lane / CHUNKS;
    const int last = tile.position + tile.queries;
    const char* const from = pages + tile.head * DIM + chunk * 16;
    auto key_of = [&](int i) { return first_key + i * (32 / CHUNKS); };
    auto copy_group = [&](int index, int group) {
        #pragma unroll
        for (int i = group; i < group + COPY_GROUP; i++) {
            const int key = index * KEYS + key_of(i);
            const long long slot = key < last ? (long long)table[key / PAGE] * PAGE + key % PAGE : 0;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         ::"r"(buffer + i * 512 + lane * 16), "l"(from + slot * heads * DIM), "r"(key < last ? 16 : 0) : "memory");
        }
    };
    auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };
    #pragma unroll
    for (int group = 0; group < COPIES; group += COPY_GROUP) { copy_group(tile.key_tiles - 1, group); commit(); }
    for (int index = tile.key_tiles - 1; index >= tile.first_key_tile(); index--) {
        barrier_wait(empty + 8 * stage, parity);
        #pragma unroll
        for (int group = 0; group < COPIES; group += COPY_GROUP) {
            asm volatile("cp.async.wait_group %0;" ::"n"(COPIES / COPY_GROUP - 1) : "memory");
            #pragma unroll
            for (int i = group; i < group + COPY_GROUP; i++) {
                const uint4 packed = load_shared(buffer + i * 512 + lane * 16);
                const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
                u32 halves[8];
                #pragma unroll
                for (int j = 0; j < 8; j++)
                    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves[j]) : "h"((unsigned short)(words[j / 2] >> j % 2 * 16)));
                const uint4 low = {halves[0], halves[1], halves[2], halves[3]}, high = {halves[4], halves[5], halves[6], halves[7]};
                const int key = key_of(i), flip = chunk / 4;  // flipped stores have other banks than those to line 0
                const u32 to = ring + stage * TILE_BYTES + chunk / 4 * LINE_BYTES + key * 128;
                const int at = chunk % 4 * 2 + flip;
                store_shared(to + ((at ^ key & 7) << 4), flip ? high : low);
                store_shared(to + ((at ^ 1 ^ key & 7) << 4), flip ? low : high);
            }
            if (index > tile.first_key_tile()) copy_group(index - 1, group);
            commit();  // an empty group also counts
        }
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8 * stage);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
}
#else
// Load the tiles of keys of a tile of queries, the last one first, by one warp, one box per lane. In the first one, the
// unit with the last key is loaded in small boxes. Boxes after that key are out of bounds for V, which TMA fills with zeros, and are not
// loaded for K, whose scores are masked.
template <bool IS_V> __device__ __forceinline__
void load_tiles(const TensorMap* map, const TensorMap* small_map, const int* table, const Tile& tile, int num_slots, u32 ring, u32 full,
                u32 empty, int& stage, int& parity) {
    const int lane = threadIdx.x % 32, line = lane % LINES, box = lane / LINES;
    int index = tile.key_tiles - 1;
    const int left = tile.position + tile.queries - index * KEYS, units = left / UNIT, smalls = UNIT / SMALL_BOX;
    const bool is_partial = left < KEYS && box >= units;
    bool is_small = is_partial && box < units + smalls;
    int key = is_small ? units * UNIT + (box - units) * SMALL_BOX : (is_partial ? box - smalls + 1 : box) * UNIT;
    auto slot_of = [&](int at) { return table[at / PAGE] * PAGE + at % PAGE; };
    int slot = key < left ? slot_of(index * KEYS + key) : num_slots;
    u32 bytes = IS_V ? TILE_BYTES : (left + SMALL_BOX - 1) / SMALL_BOX * SMALL_BOX * LINES * 128;
    for (;;) {
        const int next_slot = index > tile.first_key_tile() && box * UNIT < KEYS ? slot_of((index - 1) * KEYS + box * UNIT) : 0;  // early: its use waits for it
        barrier_wait(empty + 8 * stage, parity);
        if (lane == 0) barrier_expect(full + 8 * stage, bytes);
        __syncwarp();
        if (key < KEYS && (IS_V || slot != num_slots))
            fetch(ring + stage * TILE_BYTES + line * LINE_BYTES + key * 128, is_small ? small_map : map, 0, tile.head * LINES + line, slot, full + 8 * stage);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
        if (index-- == tile.first_key_tile()) return;
        key = box * UNIT, slot = next_slot, is_small = false, bytes = TILE_BYTES;
    }
}
#endif

// Arguments:
// - Tensor maps: q as [tokens, heads * GROUP, DIM], box [QUERIES, GROUP, 64]; K and V as [tokens of the pool, heads * LINES, 64],
//   boxes of one line of UNIT or of SMALL_BOX tokens. An FP8 pool is passed as pointers to K and V, [tokens, heads, DIM].
// - tiles: request and first (query, head) pair of each tile; out: [tokens, heads * GROUP, DIM].
// - counter: 0 before and after the kernel.
// - scale: factor on the scores, times log2(e), since exponentials are to base 2; with a soft cap, the cap times log2(e).
// - v_scale: factor on the outputs.
// - With EXTRAS: window, or 0 for none; tanh_scale, 2 * log2(e) * factor on the scores / soft cap, or 0 for none; sinks in
//   bfloat16, [heads * GROUP], or a null pointer.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
prefill(const __grid_constant__ TensorMap q_map,
#if FP8
        const char* k_pages, const char* v_pages,
#else
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
        const __grid_constant__ TensorMap k_small_map, const __grid_constant__ TensorMap v_small_map,
#endif
        const int* __restrict__ page_table, const int* rows, const int* cu_seqlens_q, const int* seq_lens, const int* tiles,
        bf16* __restrict__ out, u32* counter, float scale, float v_scale, int num_tiles, int heads, int row_stride, int num_slots
#if EXTRAS
        , int window, float tanh_scale, const bf16* sinks
#endif
        ) {
#if !EXTRAS
    constexpr int window = 0;
    constexpr float tanh_scale = 0.f;
    constexpr const bf16* sinks = nullptr;
#endif
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 barriers[12];
    __shared__ Tile queued[2];
    const u32 q_at = (shared_address(memory) + 1023) & ~1023u, k_at = q_at + 2 * TILE_BYTES, v_at = k_at + STAGES * TILE_BYTES;
    const u32 q_full = shared_address(barriers), q_empty = q_full + 16, k_full = q_full + 32, k_empty = q_full + 48, v_full = q_full + 64, v_empty = q_full + 80;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, warpgroup = thread >> 7;
    if (thread == 0) {
        for (int s = 0; s < 2; s++) {
            barrier_init(q_full + 8 * s, 1);
            barrier_init(k_full + 8 * s, PRODUCERS / 2);
            barrier_init(v_full + 8 * s, PRODUCERS / 2);
            barrier_init(q_empty + 8 * s, CONSUMERS / 32 + PRODUCERS - 1);
            barrier_init(k_empty + 8 * s, CONSUMERS / 32);
            barrier_init(v_empty + 8 * s, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    // The consumers come first: otherwise ptxas gives them no more registers than the kernel starts with.
    if (warpgroup < CONSUMERS / 128) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        const float infinity = __int_as_float(0x7F800000);
        const int row = warpgroup * 64 + (warp & 3) * 16 + (lane >> 2);  // the thread's first row; its second is 8 rows below
        int q_stage = 0, k_stage = 0, v_stage = 0, q_parity = 0, k_parity = 0, v_parity = 0;
        float scores[KEYS / 2], sums[DIM / 2];
        u32 weights[KEYS / 16][4];
        if (warpgroup == 1) arrive_named(1);  // warpgroup 0 has the first turn
        for (;;) {
            barrier_wait(q_full + 8 * q_stage, q_parity);
            const Tile tile = queued[q_stage];
            if (tile.key_tiles == 0) return;
            const int positions[2] = {tile.position + row / GROUP, tile.position + (row + 8) / GROUP};
            const int unmasked = tile.position + warpgroup * 64 / GROUP + 1;  // keys before it are visible to all rows of the warpgroup
            const int window_start = window ? tile.position + ((warpgroup * 64 + 63) / GROUP) - window + 1 : 0;  // no key from it on is outside of a row's window
            const u32 queries = q_at + q_stage * TILE_BYTES + warpgroup * 64 * 128;
#if FP8
            #pragma unroll
            for (int i = 0; i < LINES * 4; i++) {  // convert the queries in place
                const u32 at = queries + i / 4 * LINE_BYTES + (i % 4 * 128 + thread % 128) * 16;
                const uint4 chunk = load_shared(at);
                u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
                #pragma unroll
                for (u32& word : words) word = pack(__uint_as_float(word << 16) * QUERY_SCALE, __uint_as_float(word & 0xFFFF0000) * QUERY_SCALE);
                store_shared(at, uint4{words[0], words[1], words[2], words[3]});
            }
            async_proxy_fence();
            sync<128>(3 + warpgroup);
#endif
            float max_score[2] = {-infinity, -infinity}, norm[2] = {0.f, 0.f}, rescale[2];

            auto begin_scores = [&] {
                barrier_wait(k_full + 8 * k_stage, k_parity);
                sync<CONSUMERS>(1 + warpgroup);
                const u32 keys = k_at + k_stage * TILE_BYTES;
                pin(scores);
                wgmma_fence();
                #pragma unroll
                for (int i = 0; i < DIM / 16; i++) wgmma(scores, rows_of(queries + i / 4 * LINE_BYTES) + i % 4 * 2, rows_of(keys + i / 4 * LINE_BYTES) + i % 4 * 2, i > 0);
                wgmma_commit();
            };
            auto end_scores = [&] {
                pin(scores);
                if (lane == 0) barrier_arrive(k_empty + 8 * k_stage);
                if (++k_stage == STAGES) { k_stage = 0; k_parity ^= 1; }
            };
            auto begin_sums = [&](bool is_first) {
                barrier_wait(v_full + 8 * v_stage, v_parity);
                const u32 values = v_at + v_stage * TILE_BYTES;
                const int rest = (tile.position + tile.queries) % KEYS;
                if (!FP8 && is_first && rest % SMALL_BOX != 0) {  // set the rows after the last key to zero
                    const int at = rest + (thread >> 4 & 7);
                    if (at / SMALL_BOX == rest / SMALL_BOX && (thread >> 3 & 1) < LINES)
                        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + (thread >> 3 & 1) * LINE_BYTES + at * 128 + (thread & 7) * 16), "r"(0) : "memory");
                    async_proxy_fence();
                    sync<128>(3 + warpgroup);
                }
                pin(sums);
                #pragma unroll
                for (int i = 0; i < KEYS / 16; i++)
                    #pragma unroll
                    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(weights[i][j])::"memory");
                wgmma_fence();
                #pragma unroll
                for (int i = 0; i < KEYS / 16; i++) wgmma(sums, weights[i], columns_of(values + i * 16 * 128), !is_first || i > 0);
                wgmma_commit();
            };
            auto end_sums = [&] {
                pin(sums);
                if (lane == 0) barrier_arrive(v_empty + 8 * v_stage);
                if (++v_stage == STAGES) { v_stage = 0; v_parity ^= 1; }
            };
            // Replace the scores by weights. Updates the largest scores and the sums of weights; earlier sums are to be rescaled.
            auto softmax = [&](int key) {
                if (tanh_scale > 0.f) {  // tanh(x) = 1 - 2 / (1 + exp(2 * x)); the soft cap is part of `scale`
                    #pragma unroll
                    for (int i = 0; i < KEYS / 2; i++) scores[i] = 1.f - __fdividef(2.f, 1.f + exp2_of(scores[i] * tanh_scale));
                }
                if (key + KEYS > unmasked) {
                    #pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (key + i / 4 * 8 + (lane & 3) * 2 + (i & 1) > positions[i >> 1 & 1]) scores[i] = -infinity;
                }
                if (window && key < window_start) {
                    #pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (key + i / 4 * 8 + (lane & 3) * 2 + (i & 1) <= positions[i >> 1 & 1] - window) scores[i] = -infinity;
                }
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    float now = max_score[half];
                    #pragma unroll
                    for (int i = 0; i < KEYS / 4; i++) now = fmaxf(now, scores[i / 2 * 4 + half * 2 + (i & 1)]);
                    now = fmaxf(now, __shfl_xor_sync(ALL, now, 1));
                    now = fmaxf(now, __shfl_xor_sync(ALL, now, 2));
                    const float base = now == -infinity ? 0.f : now * scale;  // -inf if the row has seen no visible key yet
                    rescale[half] = exp2_of(max_score[half] * scale - base);
                    max_score[half] = now;
                    float sum = 0.f;
                    #pragma unroll
                    for (int i = 0; i < KEYS / 4; i++) {
                        float& score = scores[i / 2 * 4 + half * 2 + (i & 1)];
                        score = exp2_of(score * scale - base);
                        sum += score;
                    }
                    norm[half] = norm[half] * rescale[half] + sum;
                }
            };
            auto pack_weights = [&] {
                #pragma unroll
                for (int i = 0; i < KEYS / 16; i++)
                    #pragma unroll
                    for (int j = 0; j < 4; j++) weights[i][j] = pack(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
            };

            int key = (tile.key_tiles - 1) * KEYS;
            const int first_key = tile.first_key_tile() * KEYS;
            begin_scores();
            arrive_named(2 - warpgroup);
            wgmma_wait<0>();
            end_scores();
            softmax(key);
            pack_weights();
            for (bool is_first = true; key > first_key; is_first = false) {
                key -= KEYS;
                begin_scores();
                begin_sums(is_first);
                arrive_named(2 - warpgroup);
                wgmma_wait<1>();
                end_scores();
                softmax(key);
                if (norm[0] + norm[1] < 0.f) __trap();  // never; without a branch, ptxas moves the exponentials after the wait
                wgmma_wait<0>();
                end_sums();
                #pragma unroll
                for (int i = 0; i < DIM / 2; i++) sums[i] *= rescale[i >> 1 & 1];
                pack_weights();
            }
            begin_sums(tile.key_tiles - 1 == tile.first_key_tile());
            wgmma_wait<0>();
            end_sums();

            // Store the outputs through the memory of the queries, so that each row is written in lines of 128 bytes.
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                norm[half] += __shfl_xor_sync(ALL, norm[half], 1);
                norm[half] += __shfl_xor_sync(ALL, norm[half], 2);
                if (sinks) {
                    const float sink = __uint_as_float((u32)sinks[tile.head * GROUP + (row + 8 * half) % GROUP] << 16);
                    norm[half] += exp2_of(sink * 1.44269504f - max_score[half] * scale);
                }
                norm[half] = __fdividef(v_scale, norm[half]);
            }
            sync<128>(3 + warpgroup);  // the warpgroup has read its queries
            const u32 staged = queries + ((warp & 3) * 16 + lane % 16) * 128;
            #pragma unroll
            for (int i = 0; i < DIM / 8; i += 2) {
                const u32 to = staged + i / 8 * LINE_BYTES + ((i % 8 + lane / 16 ^ lane & 7) << 4);
                u32 words[4];
                #pragma unroll
                for (int j = 0; j < 4; j++) words[j] = pack_bf16(sums[4 * i + 2 * j] * norm[j & 1], sums[4 * i + 2 * j + 1] * norm[j & 1]);
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
            }
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < 16 * DIM / 8; i += 32) {
                const int line = (i + lane) / 8 % LINES, below = (i + lane) / 8 / LINES, at = (warp & 3) * 16 + below, pair = warpgroup * 64 + at;
                const uint4 chunk = load_shared(queries + line * LINE_BYTES + at * 128 + ((lane & 7 ^ at & 7) << 4));
                if (pair < tile.queries * GROUP)
                    *(uint4*)(out + ((long long)(tile.token + pair / GROUP) * heads * GROUP + tile.head * GROUP + pair % GROUP) * DIM + line * 64 + (lane & 7) * 8) = chunk;
            }
            async_proxy_fence();  // TMA overwrites this memory next
            __syncwarp();
            if (lane == 0) barrier_arrive(q_empty + 8 * q_stage);
            if (++q_stage == 2) { q_stage = 0; q_parity ^= 1; }
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        const int producer = warp - CONSUMERS / 32;  // 0 also loads queries
        if (producer >= PRODUCERS) return;
        const bool is_v = producer >= PRODUCERS / 2;
        if (lane == 0) {
            if (producer == 0) prefetch_map(&q_map);
#if !FP8
            prefetch_map(is_v ? &v_map : &k_map);
            prefetch_map(is_v ? &v_small_map : &k_small_map);
#endif
        }
        previous_kernel_wait();
        const int total = num_tiles * heads;
        int q_stage = 0, stage = 0, q_parity = producer == 0, parity = 1;  // the first wait for parity 1 returns at once
        for (;;) {
            if (producer == 0) {
                // Each block takes one number too many. After the last one the counter is 0 again.
                const int taken = __shfl_sync(ALL, lane == 0 ? (int)atomicInc(counter, total + gridDim.x - 1) : 0, 0);
                barrier_wait(q_empty + 8 * q_stage, q_parity);
                if (taken >= total) {
                    if (lane == 0) {
                        queued[q_stage].key_tiles = 0;
                        barrier_arrive(q_full + 8 * q_stage);
                    }
                    return;
                }
                const int head = taken % heads, request = tiles[taken / heads * 2], first = tiles[taken / heads * 2 + 1] / GROUP;
                const int begin = cu_seqlens_q[request], count = cu_seqlens_q[request + 1] - begin, queries = min(QUERIES, count - first);
                const int position = seq_lens[request] - count + first;
                if (lane == 0) {
                    const int first_key_tile = window ? max(position - window + 1, 0) / KEYS : 0;
                    queued[q_stage] = Tile{begin + first, queries, position, head, (position + queries + KEYS - 1) / KEYS, rows[request], first_key_tile};
                    barrier_expect(q_full + 8 * q_stage, QUERY_BYTES);
                    for (int line = 0; line < LINES; line++)
                        fetch(q_at + q_stage * TILE_BYTES + line * LINE_BYTES, &q_map, line * 64, head * GROUP, begin + first, q_full + 8 * q_stage);
                }
                __syncwarp();
            } else {
                barrier_wait(q_full + 8 * q_stage, q_parity);
            }
            const Tile tile = queued[q_stage];
            if (tile.key_tiles == 0) return;
            if (producer > 0) {
                __syncwarp();
                if (lane == 0) barrier_arrive(q_empty + 8 * q_stage);
            }
            if (++q_stage == 2) { q_stage = 0; q_parity ^= 1; }
            const int* const table = page_table + (long long)tile.row * row_stride;
#if FP8
            const u32 buffer = v_at + STAGES * TILE_BYTES + producer * (KEYS / 2 * DIM);
            load_tiles(is_v ? v_pages : k_pages, table, tile, heads, producer % 2, buffer, is_v ? v_at : k_at, is_v ? v_full : k_full, is_v ? v_empty : k_empty, stage, parity);
#else
            if (!is_v) load_tiles<false>(&k_map, &k_small_map, table, tile, num_slots, k_at, k_full, k_empty, stage, parity);
            else load_tiles<true>(&v_map, &v_small_map, table, tile, num_slots, v_at, v_full, v_empty, stage, parity);
#endif
        }
    }
}
