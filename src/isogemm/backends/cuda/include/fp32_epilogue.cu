// What follows the walk over K of a float32 product: alpha, C, bias, one rounding, one NaN.
//
// The host defines TYPES, small numbers of 4 bits each: the types of out, C and bias (0 float32, 1 bf16, 2 fp16), then flags:
// 1 the walk starts from C, 2 C is added, 4 there is a bias, 8 rows of out are contiguous, at multiples of 4 elements.

struct Epilogue {
  void* out;
  const void *c, *bias;
  long long out_r, out_c, out_at, c_r, c_c, c_at, bias_stride;
  float alpha, beta;

  static constexpr int types = TYPES;

  static __device__ __forceinline__ float value(const void* p, int type, long long i) {
    if (type == 0) return ((const float*)p)[i];
    const unsigned short h = ((const unsigned short*)p)[i];
    if (type == 1) return __uint_as_float((unsigned)h << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
  }
  static __device__ __forceinline__ unsigned short narrow(float v, int type) {
    unsigned short h;
    if (type == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return v == v ? h : 0x7fff;
  }
  __device__ __forceinline__ unsigned two(float low, float high) const {
    return narrow(low, types & 15) | (unsigned)narrow(high, types & 15) << 16;
  }
  // Whether and where the walk starts from C.
  __device__ __forceinline__ bool starts() const { return types >> 12 & 1; }
  __device__ __forceinline__ float start(int row, int col) const { return ((const float*)c)[c_at + row * c_r + col * c_c]; }
  // v = alpha * v; v = v + beta * C; v = v + bias: each step rounds by itself.
  __device__ __forceinline__ float finish(float v, int row, int col) const {
    if (alpha != 1.0f) v = __fmul_rn(alpha, v);
    if (types >> 12 & 2) {
      const float x = value(c, types >> 4 & 15, c_at + row * c_r + col * c_c);
      v = __fadd_rn(v, beta == 1.0f ? x : __fmul_rn(beta, x));
    }
    if (types >> 12 & 4) v = __fadd_rn(v, value(bias, types >> 8 & 15, col * bias_stride));
    return v == v ? v : __uint_as_float(0x7fffffff);
  }
  // W neighbours of one row, those left of column n.
  template <int W>
  __device__ __forceinline__ void store(float* v, int row, int col, int n) const {
    const long long at = out_at + row * out_r + col * out_c;
#pragma unroll
    for (int j = 0; j < W; ++j)
      if (col + j < n) v[j] = finish(v[j], row, col + j);
    if (W > 1 && types >> 12 & 8 && col + W <= n) {
      if (types & 15) {
        const unsigned low = two(v[0], v[1 % W]), high = two(v[2 % W], v[3 % W]);
        if (W == 4) *(uint2*)((unsigned short*)out + at) = make_uint2(low, high);
        else *(unsigned*)((unsigned short*)out + at) = low;
      } else if (W == 4) *(float4*)((float*)out + at) = make_float4(v[0], v[1 % W], v[2 % W], v[3 % W]);
      else *(float2*)((float*)out + at) = make_float2(v[0], v[1 % W]);
      return;
    }
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (col + j >= n) continue;
      if ((types & 15) == 0) ((float*)out)[at + j * out_c] = v[j];
      else ((unsigned short*)out)[at + j * out_c] = narrow(v[j], types & 15);
    }
  }
};
