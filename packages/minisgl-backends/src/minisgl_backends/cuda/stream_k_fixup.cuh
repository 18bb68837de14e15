// Fixup of Stream-K (arXiv 2301.03598): the end of the loop over tiles in small_m_gemm.cu and int4_gemm.cu, with SPLITS == 1.
// The thread block has the sums of a tile's steps from `first` to `last`. It stores them for an earlier thread block, or adds those
// of later ones and stores the tile.
// Included as text, not as a function: the compiler unrolls the loop over the stages less often if `sums` is passed to one.
if (first > 0) {  // the tile belongs to an earlier thread block
    float4* to = partials + (long long)blockIdx.x * (SUMS / 4) * CONSUMERS + thread;
    #pragma unroll
    for (int i = 0; i < SUMS; i += 4) __stcg(to + i / 4 * CONSUMERS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
    sync<CONSUMERS>(1);
    if (thread == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(arrived + blockIdx.x) : "memory");
    continue;
}
if (last < num_k_blocks) {
    int others = 0;
    while (cluster + 1 + others < num_clusters && part_begin(total, cluster + 1 + others, num_clusters) < (tile + 1) * num_k_blocks) others++;
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
if (ROW_OCTETS <= OCTETS_AT_ONCE || step < end)
    store_sums<OCTETS_AT_ONCE>(sums, staging, out, bias, first_row, column_of(tile), M, N);
else {  // no more loads: the ring becomes the staging buffer
    sync<CONSUMERS>(1);  // all consumers have read the ring
    store_sums<ROW_OCTETS>(sums, ring, out, bias, first_row, column_of(tile), M, N);
}
