// The gradient of a table of rows: rows of dy are added, in ascending order, to the rows of the table that they came from.
//
// `ids` are sorted, `order` says where each came from, ascending among equals. The first of equal ids does all of them. One
// that is no row of the table's ends the kernel with an error of the device, as torch's own kernels do.

#include "rows/common.cu"

extern "C" __global__ void __launch_bounds__(128)
table(const i64* ids, const i64* order, const void* d, void* out, const __grid_constant__ Place place, i64 d_c, i64 out_r,
      i64 out_c, i64 height, int n, int start) {
  wait_for_predecessor();
  release_successor();
  const i64 count = place.rows, first = blockIdx.x, id = ids[first];
  if (id < 0 || id >= height) __trap();
  const int c = blockIdx.y * 128 + threadIdx.x;
  if ((first > 0 && ids[first - 1] == id) || c >= n) return;
  const i64 to = id * out_r + c * out_c;
  float sum = start ? ((const float*)out)[to] : 0.0f;
  for (i64 from = first; from < count && ids[from] == id; from += 8) {
    float t[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const i64 at = min(from + k, count - 1);
      t[k] = ids[at] == id && from + k < count ? value<TD>(d, place.at(0, (u32)order[at]) + c * d_c) : -0.0f;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) sum = add(sum, t[k]);
  }
  put<TO>(out, to, sum);
}
