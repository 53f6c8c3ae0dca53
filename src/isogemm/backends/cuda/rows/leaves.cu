// Sums over rows as `columns.cu` has them, where leaves are short, or many: a thread has four columns of a leaf, adds its rows
// in ascending order, and reads EACH of them at a time.

#include "rows/common.cu"

#define EACH 8

extern "C" __global__ void __launch_bounds__(128)
columns(const void* x, const void* d, const float2* stats, void* out, const __grid_constant__ Place place,
        i64 x_c, i64 d_c, i64 out_c, i64 leaf, int n, int start) {
  const u32 across = (n + 3) / 4, thread = blockIdx.x * 128 + threadIdx.x, number = thread / across;
  const u32 begin = number * (u32)leaf, end = min(begin + (u32)leaf, place.rows);
  const int c = thread % across * 4;
  wait_for_predecessor();
  release_successor();
  if (number && begin >= place.rows) return;
  out = behind<TO>(out, number * (i64)n);
  float sum[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) sum[j] = start && c + j < n ? ((const float*)out)[(c + j) * out_c] : 0.0f;
  for (u32 first = begin; first < end; first += EACH) {
    Four<TX> xs[TERM ? EACH : 1];
    Four<TD> ds[EACH];
    float2 of_row[EACH];  // 1 / root, mean
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const u32 row = min(first + k, end - 1);
      const Spot spot = place.spot(row);
      read<TD>(d, place.at(1, spot), d_c, c, n, ds[k]);
      if constexpr (TERM > 0) {
        read<TX>(x, place.at(0, spot), x_c, c, n, xs[k]);
        of_row[k] = __ldg(stats + row);
      }
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      float t[4], v[4];
      open<TD>(ds[k], t);
      if constexpr (TERM > 0) open<TX>(xs[k], v);
      if (first + k >= end) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (TERM > 0) t[j] = mul(t[j], mul(TERM == 2 ? sub(v[j], of_row[k].y) : v[j], of_row[k].x));
        sum[j] = add(sum[j], t[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (c + j < n) put<TO>(out, (c + j) * out_c, sum[j]);
}
