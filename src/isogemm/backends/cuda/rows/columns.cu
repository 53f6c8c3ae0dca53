// Sums over rows: out[c] = ((start[c] + t[0, c]) + t[1, c]) + ..., with t = dy, dy * (x * r) or dy * ((x - mean) * r).
//
// A block has 32 columns. Warps read ahead and leave terms of TILE rows at a time in shared memory, the last warp adds them in
// order, a column a thread. -0 stands for rows behind the last one: it changes no sum, not even -0.

#include "rows/common.cu"

#define THREADS 512
#define EACH 4
#define TILE (THREADS / 8 * EACH)
extern __shared__ float memory[];  // two tiles of TILE x 32

struct Columns {
  i64 x, d, out;
};
struct Terms {
  Four<TX> x[TERM ? EACH : 1];
  Four<TD> d[EACH];
  float2 stats[EACH];  // of a row: 1 / root, mean
  __device__ __forceinline__ void begin(const void* px, const void* pd, const float2* rows, const Place& place,
                                        const Columns& column, int tile, int c, int n) {
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const u32 count = (u32)place.rows, row = min(tile * TILE + k * (THREADS / 8) + threadIdx.x / 8, count - 1);
      read<TD>(pd, place.at(1, row), column.d, c, n, d[k]);
      if constexpr (TERM > 0) {
        read<TX>(px, place.at(0, row), column.x, c, n, x[k]);
        stats[k] = __ldg(rows + row);
      }
    }
  }
  __device__ __forceinline__ void finish(float* to, const Place& place, int tile) const {
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const int at = k * (THREADS / 8) + threadIdx.x / 8;
      float t[4], v[4];
      open<TD>(d[k], t);
      if constexpr (TERM > 0) {
        open<TX>(x[k], v);
#pragma unroll
        for (int j = 0; j < 4; ++j) t[j] = mul(t[j], mul(TERM == 2 ? sub(v[j], stats[k].y) : v[j], stats[k].x));
      }
      if (tile * TILE + at >= place.rows) t[0] = t[1] = t[2] = t[3] = -0.0f;
      *(float4*)(to + at * 32 + threadIdx.x % 8 * 4) = make_float4(t[0], t[1], t[2], t[3]);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32)
columns(const void* x, const void* d, const float2* stats, void* out, const __grid_constant__ Place place,
        i64 x_c, i64 d_c, i64 out_c, int n, int start) {
  const Columns column = {x_c, d_c, out_c};
  wait_for_predecessor();
  release_successor();
  const int tiles = (int)((place.rows + TILE - 1) / TILE);
  if (threadIdx.x < THREADS) {
    if (!tiles) return;
    const int c = blockIdx.x * 32 + threadIdx.x % 8 * 4;
    Terms terms;
    terms.begin(x, d, stats, place, column, 0, c, n);
    for (int tile = 0; tile < tiles; ++tile) {
      terms.finish(memory + (tile & 1) * TILE * 32, place, tile);
      if (tile + 1 < tiles) terms.begin(x, d, stats, place, column, tile + 1, c, n);
      __syncthreads();
    }
    return;
  }
  const int c = blockIdx.x * 32 + threadIdx.x % 32;
  float sum = start && c < n ? ((const float*)out)[c * column.out] : 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    __syncthreads();
    const float* t = memory + (tile & 1) * TILE * 32 + threadIdx.x % 32;
    float ahead[32];  // half of them is read while the other half is added
#pragma unroll
    for (int k = 0; k < 16; ++k) ahead[k] = t[k * 32];
#pragma unroll
    for (int first = 0; first < TILE; first += 16) {
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        if (first + 16 < TILE) ahead[(first + 16 + k) % 32] = t[(first + 16 + k) * 32];
        sum = add(sum, ahead[(first + k) % 32]);
      }
    }
  }
  if (c < n) put<TO>(out, c * column.out, sum);
}
