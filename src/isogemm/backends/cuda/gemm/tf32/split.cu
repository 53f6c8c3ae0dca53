// float32 operands as tf32: part 0 the nearest tf32 number, hi; with PARTS 2 also part 1, lo, nearest to the rest. With
// PARTS 0 the values themselves, which gemm/sgemm reads where an operand's own lines are out of step.
//
// X[r, k] of any strides becomes out[part][item][r][k] with rows of `pitch` values, zeros beyond K. As in
// isogemm.contract.reference: to nearest even; NaN stays NaN. With PARTS 2 a finite number keeps a finite hi (where rounding
// would overflow, tf32's largest number), and the lo of infinities and NaN is 0; with PARTS 1 it overflows to infinity.
//
// Where `leaf` of K is not a multiple of 32, every leaf is followed by zeros up to `padded`, a multiple of 32, so that the
// next one starts a row of shared memory; else leaf = padded = pitch.
//
// A block converts 32 rows x 128 of K, 4 values a thread at a time. ROWS 1: rows are contiguous, not K, and the tile is
// transposed in shared memory. VECTOR: K is contiguous, rows start at multiples of
// 16 bytes, leaf = padded.

#include "include/hopper_ptx.cu"

__device__ __forceinline__ float round_tf32(float x) {
  const u32 u = __float_as_uint(x);
  return __uint_as_float((u & 0x7fffffff) > 0x7f800000 ? 0x7fffe000 : (u + 0xfff + (u >> 13 & 1)) & 0xffffe000);
}
__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & 0x7f800000) != 0x7f800000; }
__device__ __forceinline__ float high(float x) {
  if (PARTS == 0) return x;
  const float y = round_tf32(x);
  return PARTS == 2 && finite(x) && !finite(y) ? __uint_as_float(__float_as_uint(y) - 0x2000) : y;
}
__device__ __forceinline__ float low(float x, float hi) { return finite(x) ? round_tf32(__fsub_rn(x, hi)) : 0.0f; }

extern "C" __global__ void __launch_bounds__(256)
split(const float* x, float* out, i64 x_r, i64 x_k, i64 x_batch, int rows, int k, int pitch, int items, int leaf, int padded) {
  __shared__ float tile[ROWS ? 128 : 1][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k0 = blockIdx.x * 128;
  const i64 part = (i64)items * rows * pitch;
  const auto source = [&](int kk) {  // where value kk of a row comes from; k or more: from nowhere
    const int at = kk % padded;
    return at < leaf ? kk / padded * leaf + at : k;
  };
  wait_for_predecessor();
  for (i64 item = blockIdx.z; item < items; item += gridDim.z) {
    const float* from = x + item * x_batch;
    for (u32 r0 = blockIdx.y * 32; r0 < (u32)rows; r0 += gridDim.y * 32) {  // beyond 2^31 with the last step
      if (ROWS) {
        __syncthreads();
#pragma unroll 4
        for (int i = warp; i < 128; i += 8) {
          const int s = k0 + i < pitch ? source(k0 + i) : k;
          tile[ROWS ? i : 0][lane] = r0 + lane < rows && s < k ? from[(r0 + lane) * x_r + s * x_k] : 0.0f;
        }
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = r0 + warp + 8 * i, kk = k0 + 4 * lane;
        if (r >= rows || kk >= pitch) continue;
        float v[4], hi[4];
        if (!ROWS && VECTOR && kk + 4 <= k) {
          *(float4*)v = __ldg((const float4*)(from + r * x_r + kk));
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int s = source(kk + j);
            v[j] = ROWS ? tile[ROWS ? 4 * lane + j : 0][warp + 8 * i] : s < k ? from[r * x_r + s * x_k] : 0.0f;
          }
        }
        float* to = out + (item * rows + r) * pitch + kk;
#pragma unroll
        for (int j = 0; j < 4; ++j) hi[j] = high(v[j]);
        *(float4*)to = make_float4(hi[0], hi[1], hi[2], hi[3]);
        if (PARTS == 2) *(float4*)(to + part) = make_float4(low(v[0], hi[0]), low(v[1], hi[1]), low(v[2], hi[2]), low(v[3], hi[3]));
      }
    }
  }
  release_successor();
}
