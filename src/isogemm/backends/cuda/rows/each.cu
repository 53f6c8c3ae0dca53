// Operations of elements alone: N neighbours a thread, 8 where all rows are contiguous and aligned (VEC), else 1.

#include "rows/common.cu"

enum { SILU_MUL, SILU, SIGMOID, EXP, ADD, SILU_MUL_BACK };  // as isogemm.contract.rows.OPERATIONS has them in small letters

constexpr int N = VEC ? 8 : 1;
struct Columns {
  i64 x, y, d;
};

DEVICE float forward(float x, float y) {
  if (OP == SILU_MUL) return mul(silu(x), y);
  if (OP == SILU) return silu(x);
  if (OP == SIGMOID) return sigmoid(x);
  if (OP == EXP) return exp_(x);
  return add(x, y);
}

extern "C" __global__ void __launch_bounds__(256)
each(const void* x, const void* y, const void* dy, void* out, void* second, const __grid_constant__ Place place,
     i64 x_c, i64 y_c, i64 d_c, int n, u32 groups, u32 all) {
  const Columns column = {x_c, y_c, d_c};
  const u32 index = blockIdx.x * 256 + threadIdx.x;
  wait_for_predecessor();
  release_successor();
  if (index >= all) return;
  const u32 row = groups == all ? 0 : index / groups;
  const int i = (index - row * groups) * N;
  const i64 to = (i64)row * n + i;
  float a[N], b[N], d[N], u[N], w[N];
  const Spot spot = place.spot(row);
  fetch<TX, N>(x, place.at(0, spot), column.x, i, a);
  fetch<TG, N>(y, place.at(1, spot), column.y, i, b);
  fetch<TD, N>(dy, place.at(2, spot), column.d, i, d);
  if constexpr (OP == SILU_MUL_BACK) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float s = sigmoid(a[j]);
      u[j] = mul(mul(d[j], b[j]), mul(s, add(1.0f, mul(a[j], sub(1.0f, s)))));
      w[j] = mul(d[j], mul(a[j], s));
    }
    give<TX, N>(out, to, u);
    give<TG, N>(second, to, w);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) u[j] = forward(a[j], b[j]);
    give<TO, N>(out, to, u);
  }
}
