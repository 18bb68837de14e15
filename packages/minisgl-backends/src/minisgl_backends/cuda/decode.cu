// Decode attention over the paged KV pool, for Hopper: one query a request, up to 8 query heads a KV head, at the memory's speed.
//
// The keys of a batch, in tiles of 64, are cut into shares of equal length, as the work of Stream-K products is cut (arXiv
// 2301.03598); a thread block has one share of one KV head, and each processor two thread blocks. A warp has the copy engine
// fill a ring of tiles, one request's after the other's without a pause; four warps attend, each to 16 keys of a tile, and keep
// sums of their own, which they bring together where a request ends. A request that lies in several shares is merged by its
// log-sum-exps (Flash-Decoding, pytorch.org/blog/flash-decoding), by the share in which it begins: what others find is there
// by then, since it is the first that they do. Each word says by its value whether it has come, as in TensorRT-LLM's "Lamport"
// all-reduce (github.com/NVIDIA/TensorRT-LLM), so that nobody waits for a fence.
//
// Scores and sums are computed with rows and columns exchanged, keys @ queries and then values^T @ weights, since tensor cores
// take 16 rows but only 8 columns, and a KV head has few queries. Softmax runs over tiles as they come (arXiv 2205.14135).
//
// With ROTATES, queries and this step's keys come as the product in front has left them: they are normalised (with NORM) and
// rotated here, and keys and values stored. The last key of a request then goes into its tile, which was fetched without it.
//
// Programmatic dependent launch: lengths, page table and K and V of earlier steps are read before the kernel in front has
// ended; queries after, and, where they are stored by then, the tiles that hold this step's keys.
//
// What the kernel in front writes is not __restrict__: it would be read past what keeps caches in step with that kernel.
//
// To be defined: GROUP (query heads of a KV head, 1 to 8), DIM (64 or 128), PAGE (tokens a page: 8, 16, 32 or a multiple of
// 64), STAGES, ROTATES and NORM (0 or 1).

#include "common.cuh"
#include "decode_fragments.cuh"
#include "decode_rotation.cuh"
#include "decode_letters.cuh"

constexpr int KEYS = 64, KEYS_OF_WARP = 16, CONSUMERS = 128, LEAST_TILES = 2;
constexpr int LINES = DIM / 64;                   // of a key, 128 bytes each, which a swizzle takes
constexpr int TILE_BYTES = KEYS * LINES * 128, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int UNIT = PAGE < KEYS ? PAGE : KEYS;   // keys that are surely neighbours
constexpr int UNITS = KEYS / UNIT;                // of a tile
constexpr int SMALL_BOX = 8;                      // keys that a request's last tile is fetched by
constexpr int PITCH = DIM + 4;                    // of a head's sums, in floats: no two threads of a warp meet in a bank

// Keys and values are read once a step: what else a step reads is to stay in the L2 cache.
__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int line, int token, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(line), "r"(token), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}

// Where a share begins, the same in all layers of a step. The pages of its first units, and the lengths and rows of its first
// requests, 32 of each, come after it.
struct alignas(32) Beginning {
    int number, size;               // which share, and how many tiles the shares have
    int tile, last;                 // its first, and the one after its last, of all requests' tiles
    int request, first;             // whose that is, and that one's first tile
};
constexpr int BEGINNING = 128;      // words, with what comes after

// What is in a stage, for those who attend to it.
struct alignas(16) Tile {
    int request, keys;              // its first `keys` keys are there; 0: no more tiles come
    int next;                       // the request after it, or -1
    int others;                     // in how many shares after the first the request goes on
    int share;
    bool is_later;                  // whether this is one of those
    bool begins, ends;              // the request's part of this share
    bool is_last;                   // of the request
};

// q: [requests, heads * GROUP, DIM]; out the same, contiguous; maps: of K and V as [tokens, heads * LINES, 64], their boxes
// are a head's lines of UNIT and of SMALL_BOX tokens. scale: of the scores, to base 2. letters: of what each share has found of
// a request that begins before it, [shares, heads, GROUP, DIM + 4]; NOTHING before and after. Thread blocks: heads times the
// number of shares; those that have work are the first, later shares before earlier ones, so that nobody waits for one that has
// not begun. For ROTATES alone: k, v: [requests, heads, DIM]; cos, sin: [requests, DIM / 2]; q_gain, k_gain: [DIM], of NORM;
// k_pages, v_pages: [tokens, heads, DIM]; slots: which of these each request's token is. beginnings: [shares, BEGINNING], made
// by a step's first layer and read by the others, since what they say takes several trips to memory to find.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)
decode(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
       const __grid_constant__ TensorMap k_small_map, const __grid_constant__ TensorMap v_small_map,
       const bf16* q, const int* __restrict__ page_table, const int* __restrict__ rows,
       const int* __restrict__ seq_lens, bf16* __restrict__ out, u32* letters, float scale, int num_requests, int heads,
       int row_stride, int q_stride_t, int q_stride_h, const bf16* k, const bf16* v, int k_stride_t, int k_stride_h,
       int v_stride_t, int v_stride_h, const bf16* cos, const bf16* sin, const bf16* __restrict__ q_gain,
       const bf16* __restrict__ k_gain, float eps, bf16* k_pages, bf16* v_pages, const long long* slots,
       int* beginnings, int makes_beginnings) {
    extern __shared__ __align__(1024) char memory[];
    char* const after_ring = memory + STAGES * STAGE_BYTES;
    float* const sums = (float*)after_ring;                              // [4 warps, GROUP, PITCH]
    float2* const stats = (float2*)(sums + 4 * GROUP * PITCH);           // [4 warps, GROUP]: largest score, sum of weights
    Tile* const tiles = (Tile*)(stats + 4 * GROUP);                      // [STAGES]
    u64* const barriers = (u64*)(tiles + STAGES);
    const u32 ring = shared_address(memory), full = shared_address(barriers), empty = full + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int head = blockIdx.x % heads, num_shares = gridDim.x / heads;

    if (thread == CONSUMERS) {
        fetch_map(&k_map);
        fetch_map(&v_map);
        fetch_map(&k_small_map);
        fetch_map(&v_small_map);
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
    // Who reads the beginnings starts when those who make them have ended. That nobody reads the last ones any more when they are
    // made, kernels between two steps see to that wait for all before them (sampling's).
    if (!makes_beginnings) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    if (warp == CONSUMERS / 32) {
        // Pages of a request's units from `unit` on, one a thread.
        auto pages_of = [&](int row, int length, int unit) {
            int page = (unit + lane) * UNIT / PAGE;
            return page * PAGE < length ? page_table[(long long)row * row_stride + page] : 0;
        };
        int length_of = 0, row_of = 0;  // of the share's first request and those after it, one a thread
        auto look_up = [&](int request) {
            int index = min(request + lane, num_requests - 1);
            length_of = seq_lens[index];
            row_of = rows[index];
        };
        Beginning share;
        int* const record = beginnings + blockIdx.x / heads * BEGINNING;
        int next_pages = 0;
        if (makes_beginnings) {
            // Each thread counts the tiles of some requests.
            const int each = (num_requests + 31) / 32;
            auto tiles_of = [&](int request) {
                return request < num_requests ? (seq_lens[request] + KEYS - 1) / KEYS : 0;
            };
            int mine = 0;
            for (int i = 0; i < each; i++) mine += tiles_of(lane * each + i);
            int until_mine = mine;
            for (int i = 1; i < 32; i *= 2) {
                int other = __shfl_up_sync(ALL, until_mine, i);
                if (lane >= i) until_mine += other;
            }
            const int num_tiles = __shfl_sync(ALL, until_mine, 31);
            share.size = max((num_tiles + num_shares - 1) / num_shares, LEAST_TILES);
            share.number = (num_tiles + share.size - 1) / share.size - 1 - blockIdx.x / heads;
            share.tile = max(share.number * share.size, 0);
            share.last = share.number < 0 ? 0 : min(share.tile + share.size, num_tiles);
            int request = lane * each, first = until_mine - mine;
            const bool is_here = first <= share.tile && share.tile < until_mine;
            if (is_here)
                for (int count; first + (count = tiles_of(request)) <= share.tile; request++) first += count;
            const int finder = __ffs(__ballot_sync(ALL, is_here)) - 1;
            share.request = __shfl_sync(ALL, request, finder);
            share.first = __shfl_sync(ALL, first, finder);
            look_up(share.request);
            next_pages = pages_of(__shfl_sync(ALL, row_of, 0), __shfl_sync(ALL, length_of, 0), (share.tile - share.first) * UNITS & ~31);
            if (head == 0) {
                if (lane == 0) *(Beginning*)record = share;
                record[32 + lane] = next_pages;
                record[64 + lane] = length_of;
                record[96 + lane] = row_of;
                __threadfence();
            }
        } else {
            share = *(const Beginning*)record;
            next_pages = record[32 + lane];
            length_of = record[64 + lane];
            row_of = record[96 + lane];
        }
        int tile = share.tile, request = share.request, first = share.first;
        const int size = share.size, last = share.last;
        bool has_waited = false;
        int s = 0, parity = 1;  // an empty stage's barrier has its phase before the first behind it
        if (share.number >= 0) {
            int known = request;  // the first that length_of and row_of are of
            int pages = 0, unit = -1, next_request = request, next_unit = (tile - first) * UNITS & ~31;
            while (tile < last) {
                if (request - known == 32) {
                    known = request;
                    look_up(known);
                }
                const int length = __shfl_sync(ALL, length_of, request - known), row = __shfl_sync(ALL, row_of, request - known);
                const int count = (length + KEYS - 1) / KEYS, after = first + count, until = min(after, last);
                const int one = first / size, other = (after - 1) / size;
                unit = -1;
                for (const int from = tile; tile < until; tile++) {
                    const int place = tile - first, keys = min(KEYS, length - place * KEYS);
                    if (unit < 0 || place * UNITS >= unit + 32) {
                        unit = place * UNITS & ~31;
                        pages = next_request == request && next_unit == unit ? next_pages : pages_of(row, length, unit);
                        // What comes next, a block of pages ahead.
                        next_request = request;
                        next_unit = unit + 32;
                        if (next_unit < (until - first) * UNITS) {
                            next_pages = pages_of(row, length, next_unit);
                        } else if (until < last && request + 1 - known < 32) {
                            const int next_length = __shfl_sync(ALL, length_of, request + 1 - known);
                            const int next_row = __shfl_sync(ALL, row_of, request + 1 - known);
                            next_request = request + 1;
                            next_unit = 0;
                            next_pages = pages_of(next_row, next_length, 0);
                        }
                    }
                    if (!ROTATES && place == count - 1 && !has_waited) {
                        previous_kernel_wait();  // it writes this step's key
                        has_waited = true;
                    }
                    barrier_wait(empty + 8 * s, parity);
                    const int box = keys == KEYS ? UNIT : SMALL_BOX, copies = (keys + box - 1) / box * 2;
                    const u32 barrier = full + 8 * s;
                    if (lane == 0) {
                        tiles[s] = Tile{request, keys, until < last ? request + 1 : -1, other - one, share.number, share.number > one, tile == from, tile == until - 1, place == count - 1};
                        barrier_expect(barrier, copies * box * LINES * 128);
                    }
                    __syncwarp();
                    const int is_v = lane & 1, key = (lane >> 1) * box;
                    const int page = __shfl_sync(ALL, pages, (place * UNITS + key / UNIT - unit) & 31);
                    if (lane < copies) {
                        const u32 to = ring + s * STAGE_BYTES + is_v * TILE_BYTES + key * LINES * 128;
                        const TensorMap* map = keys == KEYS ? (is_v ? &v_map : &k_map) : (is_v ? &v_small_map : &k_small_map);
                        fetch(to, map, head * LINES, page * PAGE + (place * KEYS + key) % PAGE, barrier);
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

    const int row = lane >> 2, pair = lane & 3;  // of a fragment: of 8 rows one, of 8 columns two
    previous_kernel_wait();
    u32 queries[DIM / 8], next_queries[DIM / 8];
    auto load_queries = [&](u32 (&to)[DIM / 8], int request) {
        const bf16* from = q + (long long)request * q_stride_t + (long long)(head * GROUP + row) * q_stride_h + pair * 2;
        #pragma unroll
        for (int i = 0; i < DIM / 8; i++) to[i] = row < GROUP ? *(const u32*)(from + i * 8) : 0;
    };
    auto turn_queries = [&](int request) {
        const bf16 *c = cos + (long long)request * (DIM / 2) + pair * 2, *s = sin + (long long)request * (DIM / 2) + pair * 2, *gain = q_gain + pair * 2;
        float squares = 0.f;
        #pragma unroll
        for (int i = 0; i < DIM / 8; i++) squares += square_of(queries[i]);
        for (int i = 1; i < 4; i *= 2) squares += __shfl_xor_sync(ALL, squares, i);
        const float normal = NORM ? rsqrtf(squares / DIM + eps) : 1.f;
        #pragma unroll
        for (int i = 0; i < DIM / 16; i++)
            turn(queries[i], queries[i + DIM / 16], normal, NORM ? two_of(gain + i * 8) : 0, NORM ? two_of(gain + i * 8 + DIM / 2) : 0, two_of(c + i * 8), two_of(s + i * 8));
    };
    // This step's key and value of a request: to the pool, and to the tile at `to`, as its key number `key`.
    auto add_key = [&](int request, u32 to, int key) {
        const bool is_here = lane < DIM / 4;
        const int d = is_here ? 2 * lane : 0;
        const bf16 *k_from = k + (long long)request * k_stride_t + head * k_stride_h + d, *v_from = v + (long long)request * v_stride_t + head * v_stride_h + d;
        u32 halves[2][2] = {{two_of(k_from), two_of(k_from + DIM / 2)}, {two_of(v_from), two_of(v_from + DIM / 2)}};
        const u32 c = two_of(cos + (long long)request * (DIM / 2) + d), s = two_of(sin + (long long)request * (DIM / 2) + d);
        const u32 gains[2] = {NORM ? two_of(k_gain + d) : 0, NORM ? two_of(k_gain + d + DIM / 2) : 0};
        const long long slot = slots[request];
        float squares = is_here ? square_of(halves[0][0]) + square_of(halves[0][1]) : 0.f;
        for (int i = 1; i < 32; i *= 2) squares += __shfl_xor_sync(ALL, squares, i);
        turn(halves[0][0], halves[0][1], NORM ? rsqrtf(squares / DIM + eps) : 1.f, gains[0], gains[1], c, s);
        if (is_here) {
            #pragma unroll
            for (int is_v = 0; is_v < 2; is_v++)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int dim = d + half * (DIM / 2), line = dim / 64;
                    *(u32*)((is_v ? v_pages : k_pages) + (slot * heads + head) * DIM + dim) = halves[is_v][half];
                    const u32 at = to + is_v * TILE_BYTES + (key * LINES + line) * 128 + ((dim % 64 / 8 ^ key * LINES & 7 ^ line) << 4) + dim % 8 * 2;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(halves[is_v][half]) : "memory");
                }
            // The copy engine writes there next.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
    };
    float found[DIM / 16][4], top[2], norm[2];
    bool is_first = true;
    // Of a warp's fragments in a stage. A line's 16-byte pieces are exchanged by the last 3 bits of its number.
    const int k_row = warp * KEYS_OF_WARP + (lane & 15), k_piece = lane >> 4;
    const int v_row = warp * KEYS_OF_WARP + (lane & 7) + (lane >> 4) * 8, v_piece = lane >> 3 & 1;
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
            if (ROTATES) turn_queries(tile.request);
            top[0] = top[1] = -__int_as_float(0x7F800000);
            norm[0] = norm[1] = 0.f;
            #pragma unroll
            for (int i = 0; i < DIM / 16; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++) found[i][j] = 0.f;
        }
        const int keys = tile.keys - warp * KEYS_OF_WARP;  // of this warp
        if (ROTATES && tile.is_last && 0 < keys && keys <= KEYS_OF_WARP) add_key(tile.request, ring + s * STAGE_BYTES, tile.keys - 1);
        if (keys > 0) {
            const u32 k_at = ring + s * STAGE_BYTES + k_row * LINES * 128, v_at = ring + s * STAGE_BYTES + TILE_BYTES + v_row * LINES * 128;
            float scores[2][4] = {};
            #pragma unroll
            for (int i = 0; i < DIM / 16; i++) {
                const Matrix k = load_matrix(k_at + i / 4 * 128 + ((i % 4 * 2 + k_piece ^ k_row * LINES & 7 ^ i / 4) << 4));
                multiply_add(scores[i & 1], k, queries[2 * i], queries[2 * i + 1]);
            }
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[0][j] = (scores[0][j] + scores[1][j]) * scale;
                if (row + (j >> 1) * 8 >= keys) scores[0][j] = -__int_as_float(0x7F800000);
            }
            float weights[4], kept[2];
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const float new_top = fmaxf(top[j], most(fmaxf(scores[0][j], scores[0][j + 2])));
                kept[j] = exp2_of(top[j] - new_top);
                weights[j] = exp2_of(scores[0][j] - new_top);
                weights[j + 2] = exp2_of(scores[0][j + 2] - new_top);
                top[j] = new_top;
                norm[j] = norm[j] * kept[j] + weights[j] + weights[j + 2];
            }
            if (__any_sync(ALL, kept[0] != 1.f || kept[1] != 1.f)) {
                #pragma unroll
                for (int i = 0; i < DIM / 16; i++)
                    #pragma unroll
                    for (int j = 0; j < 4; j++) found[i][j] *= kept[j & 1];
            }
            const u32 low = exchanged(rounded(weights[0], weights[1])), high = exchanged(rounded(weights[2], weights[3]));
            // What lies behind a request's last key may be anything, even no number.
            auto inside = [&](int key) { return (key < keys ? 0xFFFFu : 0u) | (key + 1 < keys ? 0xFFFF0000u : 0u); };
            const u32 low_inside = inside(pair * 2), high_inside = inside(pair * 2 + 8);
            #pragma unroll
            for (int i = 0; i < DIM / 16; i++) {
                Matrix v = load_matrix_exchanged(v_at + i / 4 * 128 + ((i % 4 * 2 + v_piece ^ v_row * LINES & 7 ^ i / 4) << 4));
                v.a &= low_inside;
                v.b &= low_inside;
                v.c &= high_inside;
                v.d &= high_inside;
                multiply_add(found[i], v, low, high);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * s);
        if (++s == STAGES) { s = 0; parity ^= 1; }
        if (!tile.ends) continue;

        constexpr int QUADS = GROUP * DIM / 4, EACH = (QUADS + CONSUMERS - 1) / CONSUMERS, AT_ONCE = 5 / EACH;
        const long long pitch = (long long)heads * LETTER;
        u32* const mine = letters + tile.share * pitch + head * LETTER;
        auto is_mine = [&](int j) { return thread + j * CONSUMERS < QUADS; };
        auto quad = [&](int j) { return min(thread + j * CONSUMERS, QUADS - 1) * 4; };
        int place[EACH], of_lse[EACH];  // in a letter
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            place[j] = quad(j) / DIM * (DIM + 4) + quad(j) % DIM;
            of_lse[j] = quad(j) / DIM * (DIM + 4) + DIM;
        }
        const bool merges = !tile.is_later && tile.others > 0;
        auto letter = [&](int other) { return mine + min(other, tile.others) * pitch; };
        auto ask = [&](Quad (&its)[EACH], float (&its_lse)[EACH], int other) {
            #pragma unroll
            for (int j = 0; j < EACH; j++) {
                its[j] = look(letter(other) + place[j]);
                its_lse[j] = look_at_one(letter(other) + of_lse[j]);
            }
        };
        auto is_here = [&](const Quad (&its)[EACH], const float (&its_lse)[EACH]) {
            bool all = true;
            #pragma unroll
            for (int j = 0; j < EACH; j++) all = all && (!is_mine(j) || (has_come(its[j]) && has_come(its_lse[j])));
            return all;
        };
        Quad next[EACH];
        float next_lse[EACH];

        #pragma unroll
        for (int j = 0; j < 2; j++) {
            norm[j] = total(norm[j]);
            const int query = 2 * pair + j;
            if (query >= GROUP) continue;
            if (row == 0) stats[warp * GROUP + query] = make_float2(top[j], norm[j]);
            float* to = sums + (warp * GROUP + query) * PITCH + row;
            #pragma unroll
            for (int i = 0; i < DIM / 16; i++) {
                to[i * 16] = found[i][j];
                to[i * 16 + 8] = found[i][j + 2];
            }
        }
        if (merges) ask(next, next_lse, 1);  // before what it is merged with is there
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
                const float factor = exp2_of(of[w].x - largest);
                const Quad part = *(const Quad*)(sums + (w * GROUP + query) * PITCH + dim);
                weight += of[w].y * factor;
                sum.x += part.x * factor; sum.y += part.y * factor; sum.z += part.z * factor; sum.w += part.w * factor;
            }
            const float share_of_one = 1.f / weight;
            value[j] = Quad{sum.x * share_of_one, sum.y * share_of_one, sum.z * share_of_one, sum.w * share_of_one};
            lse[j] = largest + __log2f(weight);
        }
        sync<CONSUMERS>(1);  // all have read the sums
        if (merges) {
            float weight[EACH];
            #pragma unroll
            for (int j = 0; j < EACH; j++) weight[j] = 1.f;
            auto merge = [&](const Quad (&its)[EACH], const float (&its_lse)[EACH], int other) {
                #pragma unroll
                for (int j = 0; j < EACH; j++) {
                    if (other > tile.others || !is_mine(j)) continue;
                    const float largest = fmaxf(lse[j], its_lse[j]);
                    const float kept = exp2_of(lse[j] - largest), factor = exp2_of(its_lse[j] - largest);
                    value[j].x = value[j].x * kept + its[j].x * factor;
                    value[j].y = value[j].y * kept + its[j].y * factor;
                    value[j].z = value[j].z * kept + its[j].z * factor;
                    value[j].w = value[j].w * kept + its[j].w * factor;
                    weight[j] = weight[j] * kept + factor;
                    lse[j] = largest;
                    // For the next layer; all of this query's threads, which are of one warp, have seen them.
                    leave(letter(other) + place[j], NOTHING, NOTHING, NOTHING, NOTHING);
                    leave_one(letter(other) + of_lse[j], NOTHING);
                }
            };
            while (__any_sync(ALL, !is_here(next, next_lse))) ask(next, next_lse, 1);
            merge(next, next_lse, 1);
            for (int other = 2; other <= tile.others; other += AT_ONCE) {
                Quad its[AT_ONCE][EACH];
                float its_lse[AT_ONCE][EACH];
                bool all;
                do {  // without a branch, so that all are on their way together
                    #pragma unroll
                    for (int a = 0; a < AT_ONCE; a++) ask(its[a], its_lse[a], other + a);
                    all = true;
                    #pragma unroll
                    for (int a = 0; a < AT_ONCE; a++) all = all && is_here(its[a], its_lse[a]);
                } while (__any_sync(ALL, !all));
                #pragma unroll
                for (int a = 0; a < AT_ONCE; a++) merge(its[a], its_lse[a], other + a);
            }
            #pragma unroll
            for (int j = 0; j < EACH; j++) {
                const float share_of_one = 1.f / weight[j];
                value[j].x *= share_of_one; value[j].y *= share_of_one; value[j].z *= share_of_one; value[j].w *= share_of_one;
            }
        }
        bf16* const to = out + ((long long)tile.request * heads + head) * GROUP * DIM;
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (!is_mine(j)) continue;
            if (!tile.is_later) {
                *(uint2*)(to + (thread + j * CONSUMERS) * 4) = make_uint2(rounded(value[j].x, value[j].y), rounded(value[j].z, value[j].w));
            } else {
                leave(mine + place[j], word(value[j].x), word(value[j].y), word(value[j].z), word(value[j].w));
                if (place[j] + DIM == of_lse[j]) leave_one(mine + of_lse[j], word(lse[j]));
            }
        }
    }
}
