// Epilogue of small_m_gemm.cu and int4_gemm.cu: reduction of partial sums, bias, activation and store.
// Macros: see small_m_gemm.cu.

constexpr int WARPGROUP_ROWS = OUTPUTS == 64 ? ROWS / 2 : ROWS;  // rows of x that a warpgroup multiplies
constexpr int SUMS = WARPGROUP_ROWS / 2;                         // of a thread
constexpr int ROW_OCTETS = WARPGROUP_ROWS / 8;                   // a thread has 4 sums of each 8 rows: 2 rows, outputs n and n + 8
constexpr int PITCH = OUTPUTS * 2 + 16;            // bytes per staged row, padded against bank conflicts
constexpr int STORE_THREADS = OUTPUTS == 64 ? 128 : 256; // threads that store the same rows
constexpr int COLUMNS = GATED ? OUTPUTS / 2 : OUTPUTS;
constexpr int SHARING_BLOCKS = CLUSTER * ROW_PARTS;       // thread blocks that share loads by multicast

// First of the 16 outputs of a tile that the warp computes.
__device__ __forceinline__ int first_output() {
    return (OUTPUTS == 128 ? (threadIdx.x >> 7) * 64 : 0) + (threadIdx.x >> 5 & 3) * 16;
}
// Rows of the weight matrix of the thread's two outputs of the tile at `column`; past its end, the last row.
__device__ __forceinline__ int2 weight_rows(int column, int N) {
    auto row_of = [&](int output) {
        int row = GATED && output >= COLUMNS ? N + column + output - COLUMNS : column + output;
        return min(row, (GATED ? 2 * N : N) - 1);
    };
    int output = first_output() + (threadIdx.x & 31) / 4;
    return make_int2(row_of(output), row_of(output + 8));
}
__device__ __forceinline__ float2 biases(const bf16* bias, int column, int N) {
    if (!HAS_BIAS) return make_float2(0.f, 0.f);
    const int2 rows = weight_rows(column, N);
    return make_float2(__uint_as_float((u32)bias[rows.x] << 16), __uint_as_float((u32)bias[rows.y] << 16));
}
// Multiply the sums of a tile by the scales of its rows of x, from `first_row` on, and of its outputs.
__device__ __forceinline__ void scale_sums(float (&sums)[SUMS], const float* x_scales, const float* weight_scales, int first_row, int column, int M, int N) {
    const int2 outputs = weight_rows(column, N);
    const float low = weight_scales[outputs.x], high = weight_scales[outputs.y];
    const int row = first_row + (OUTPUTS == 64 ? (threadIdx.x >> 7) * WARPGROUP_ROWS : 0) + (threadIdx.x & 3) * 2;
    auto scale_of = [&](int index) {
        float scale;  // in asm, so that it is not loaded before the previous kernel has ended
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale) : "l"(x_scales + min(row + index, M - 1)) : "memory");
        return scale;
    };
    #pragma unroll
    for (int octet = 0; octet < ROW_OCTETS; octet++) {
        const float first = scale_of(octet * 8), second = scale_of(octet * 8 + 1);
        float* of = sums + octet * 4;
        of[0] *= low * first, of[1] *= low * second, of[2] *= high * first, of[3] *= high * second;
    }
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

// Store a complete tile to `out` from `first_row` on, OCTETS_AT_ONCE * 8 rows at a time.
template <int OCTETS_AT_ONCE> __device__ __forceinline__ void store_sums(float (&sums)[SUMS], u32 staging, bf16* out, const bf16* bias, int first_row, int column,
                                           int M, int N) {
    int warpgroup = threadIdx.x >> 7, row = first_row + (OUTPUTS == 64 ? warpgroup * WARPGROUP_ROWS : 0), id = OUTPUTS == 64 ? 2 + warpgroup : 1;
    if (OUTPUTS == 64) staging += warpgroup * OCTETS_AT_ONCE * 8 * PITCH;
    float2 own_bias = biases(bias, column, N);
    #pragma unroll
    for (int octet = 0; octet < ROW_OCTETS; octet += OCTETS_AT_ONCE) {
        const int count = ROW_OCTETS - octet < OCTETS_AT_ONCE ? ROW_OCTETS - octet : OCTETS_AT_ONCE;
        if (row + octet * 8 >= M) continue;
        sync<STORE_THREADS>(id);
        #pragma unroll
        for (int j = 0; j < count; j++) {
            const int i = 4 * (octet + j);
            stage_rows(staging + j * 8 * PITCH, sums[i] + own_bias.x, sums[i + 1] + own_bias.x, sums[i + 2] + own_bias.y,
                      sums[i + 3] + own_bias.y);
        }
        sync<STORE_THREADS>(id);
        store_rows(staging, out, row + octet * 8, count * 8, column, M, N);
    }
}

// First octet (8 rows) that thread block `split` of the cluster reduces.
__device__ __forceinline__ int first_octet(int split) { return ROW_OCTETS * split / SPLITS; }
constexpr int MAX_ROW_OCTETS = (ROW_OCTETS + SPLITS - 1) / SPLITS;  // largest number of octets that one thread block reduces

// Reduce the sums of the SPLITS thread blocks that have the same rows and other inputs; each reduces and stores a part of the rows.
__device__ __forceinline__ void reduce_and_store(float (&sums)[SUMS], u32 ring, u32 reduce_barrier, bf16* out, const bf16* bias, int first_row,
                                                  int column, int split, int row_part, int M, int N) {
    int thread = threadIdx.x, warpgroup = thread >> 7;
    u32 own = ring + thread * 16, remote[SPLITS], barrier[SPLITS];  // [SPLITS][MAX_ROW_OCTETS][CONSUMERS] of 4 sums
    #pragma unroll
    for (int to = 0; to < SPLITS; to++) {
        int block = to * ROW_PARTS + row_part;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote[to]) : "r"(own + split * MAX_ROW_OCTETS * CONSUMERS * 16), "r"(block));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier[to]) : "r"(reduce_barrier), "r"(block));
    }
    cluster_sync();  // all blocks have read their stages, which the sums overwrite
    #pragma unroll
    for (int j = 0; j < ROW_OCTETS; j++) {
        const int to = ((j + 1) * SPLITS - 1) / ROW_OCTETS;  // the block that reduces octet j
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(remote[to] + (j - ROW_OCTETS * to / SPLITS) * CONSUMERS * 16), "f"(sums[4 * j]), "f"(sums[4 * j + 1]),
                       "f"(sums[4 * j + 2]), "f"(sums[4 * j + 3]), "r"(barrier[to]) : "memory");
    }
    barrier_wait(reduce_barrier, 0);
    int begin = first_octet(split), count = first_octet(split + 1) - begin;
    u32 staging = ring + SPLITS * MAX_ROW_OCTETS * CONSUMERS * 16 + (OUTPUTS == 64 ? warpgroup * MAX_ROW_OCTETS * 8 * PITCH : 0);
    float2 own_bias = biases(bias, column, N);
    for (int j = 0; j < count; j++) {
        float a = own_bias.x, b = own_bias.x, c = own_bias.y, d = own_bias.y;
        #pragma unroll
        for (int from = 0; from < SPLITS; from++) {
            float4 part;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                         : "r"(own + (from * MAX_ROW_OCTETS + j) * CONSUMERS * 16) : "memory");
            a += part.x; b += part.y; c += part.z; d += part.w;
        }
        stage_rows(staging + j * 8 * PITCH, a, b, c, d);
    }
    sync<STORE_THREADS>(OUTPUTS == 64 ? 2 + warpgroup : 1);
    store_rows(staging, out, first_row + (OUTPUTS == 64 ? warpgroup * WARPGROUP_ROWS : 0) + begin * 8, count * 8, column, M, N);
}

// First step of a part, with `total` steps divided into equal parts. The product is below 2 ** 32 for weights of up to 2 ** 37 values.
__device__ __forceinline__ int part_begin(int total, int part, int num_parts) { return (u32)total * (u32)part / (u32)num_parts; }
