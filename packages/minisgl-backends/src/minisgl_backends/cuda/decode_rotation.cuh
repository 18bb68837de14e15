// How decode.cu normalises (with NORM) and rotates pairs of numbers.

__device__ __forceinline__ float2 floats(u32 both) { return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u)); }
__device__ __forceinline__ u32 two_of(const bf16* x) { return *(const u32*)x; }
__device__ __forceinline__ float2 times(u32 both, float scale, u32 gains) {  // rounded as torch does
    const float2 x = floats(both), gain = floats(gains), normed = floats(rounded(x.x * scale, x.y * scale));
    return floats(rounded(normed.x * gain.x, normed.y * gain.y));
}
// Two dimensions and the two that they are turned with.
__device__ __forceinline__ void turn(u32& first, u32& second, float scale, u32 first_gain, u32 second_gain, u32 cosines, u32 sines) {
    const float2 a = NORM ? times(first, scale, first_gain) : floats(first), b = NORM ? times(second, scale, second_gain) : floats(second);
    const float2 c = floats(cosines), s = floats(sines);
    first = rounded(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
    second = rounded(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
}
__device__ __forceinline__ float square_of(u32 both) { const float2 x = floats(both); return x.x * x.x + x.y * x.y; }
