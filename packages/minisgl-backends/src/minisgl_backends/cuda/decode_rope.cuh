// RMSNorm (with NORM) and RoPE of decode.cu, on packed pairs of bfloat16.

__device__ __forceinline__ float2 unpack_bf16(u32 both) { return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u)); }
__device__ __forceinline__ u32 load_pair(const bf16* x) { return *(const u32*)x; }
__device__ __forceinline__ float2 times_weight(u32 both, float scale, u32 weight_pair) {  // rounded where torch rounds
    const float2 x = unpack_bf16(both), norm_weight = unpack_bf16(weight_pair), normed = unpack_bf16(pack_bf16(x.x * scale, x.y * scale));
    return unpack_bf16(pack_bf16(normed.x * norm_weight.x, normed.y * norm_weight.y));
}
// Rotate two dimensions with the two dimensions that they are paired with.
__device__ __forceinline__ void apply_rope(u32& first, u32& second, float scale, u32 first_weight, u32 second_weight, u32 cosines, u32 sines) {
    const float2 a = NORM ? times_weight(first, scale, first_weight) : unpack_bf16(first), b = NORM ? times_weight(second, scale, second_weight) : unpack_bf16(second);
    const float2 c = unpack_bf16(cosines), s = unpack_bf16(sines);
    first = pack_bf16(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
    second = pack_bf16(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
}
__device__ __forceinline__ float sum_of_squares(u32 both) { const float2 x = unpack_bf16(both); return x.x * x.x + x.y * x.y; }
