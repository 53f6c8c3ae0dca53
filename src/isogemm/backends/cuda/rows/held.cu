// Rows that fit into registers: W warps a row, H groups of 128 * W elements; each thread has four neighbours of each group.
//
// With one warp a row, a thread owns four lanes and adds in registers; a block has TEAMS warps, each with EACH rows at a time.
// With more, elements meet in shared memory, where 32 * W threads, 128 at most, walk the lanes in order.
// VEC: rows are contiguous, of a multiple of four elements, and start where four can be read at once. FULL: n = 128 * W * H.

#include "rows/common.cu"
#include "rows/ops.cu"

extern __shared__ float memory[];  // W > 1: 128 * W * H values, 128 lanes

struct Row {
  float v[H][4], g[TWO ? H : 1][4];
};

DEVICE int first_of(int h) { return (h * W + (W == 1 ? 0 : threadIdx.x >> 5)) * 128 + (threadIdx.x & 31) * 4; }

DEVICE bool beyond(int i, int j, int n) { return !FULL && (VEC ? i : i + j) >= n; }

template <int P> DEVICE float largest(const Row& row, int n) {
  float m = -infinity();
#pragma unroll
  for (int h = 0; h < H; ++h)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (!beyond(first_of(h), j, n)) m = fmaxf(m, row.v[h][j]);
  return W == 1 ? most(m) : most_of_block<W>(m, memory + 128 * W * H);
}

template <int P> DEVICE float total(const Row& row, int n) {
  if (fold<P>() == LARGEST) return largest<P>(row, n);
  float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int h = 0; h < H; ++h) {
    const int i = first_of(h);
    float t[4];
    terms_of<P>(row.v[h], row.g[TWO ? h : 0], t);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (beyond(i, j, n)) t[j] = 0.0f;
      if (W == 1) lanes[j] = step<P>(lanes[j], t[j]);
    }
    if (W > 1) *(float4*)(memory + i) = make_float4(t[0], t[1], t[2], t[3]);
  }
  if (W == 1) return meet(lanes);
  __syncthreads();
  constexpr int WALKERS = W >= 4 ? 128 : 32 * W;
  float* sums = memory + 128 * W * H;
  if (threadIdx.x < WALKERS) {
    const int steps = FULL ? W * H : (n + 127) / 128;
#pragma unroll
    for (int lane = threadIdx.x; lane < 128; lane += WALKERS) {
      float sum = 0.0f;
#pragma unroll 8
      for (int s = 0; s < steps; ++s) sum = step<P>(sum, memory[s * 128 + lane]);
      sums[lane] = sum;
    }
  }
  __syncthreads();
  // Values may be written anew at once: walkers are behind the barrier, and so are the readers of the lanes before the next.
  return meet_shared(sums);
}

template <int P> DEVICE void pass(Row (&rows)[EACH], int n, float eps, float (&s)[EACH][4]) {
  if constexpr (P <= PASSES) {
    if constexpr (P > 0 || GIVEN) {
#pragma unroll
      for (int r = 0; r < EACH; ++r)
#pragma unroll
        for (int h = 0; h < H; ++h) change<P>(rows[r].v[h], s[r]);
    }
    if constexpr (P < PASSES) {
#pragma unroll
      for (int r = 0; r < EACH; ++r) settle<P>(total<P>(rows[r], n), (float)n, eps, s[r]);
    }
    pass<P + 1>(rows, n, eps, s);
  }
}

extern "C" __global__ void __launch_bounds__(32 * W * TEAMS)
rows(const void* x, const void* other, const void* weight, const void* bias, void* out, void* second,
     const __grid_constant__ Place place, i64 x_c, i64 g_c, i64 w_c, i64 b_c, int n, float eps) {
  const Columns column = {x_c, g_c, w_c, b_c};
  const u32 count = (u32)place.rows;
  const u32 first = W == 1 ? (blockIdx.x * TEAMS + (threadIdx.x >> 5)) * EACH : blockIdx.x;
  wait_for_predecessor();
  release_successor();
  if (first >= count) return;
  Row row[EACH];
  float s[EACH][4];
  i64 from[EACH];
  int target[EACH];
#pragma unroll
  for (int r = 0; r < EACH; ++r) {
    const u32 at = min(first + r, count - 1);
    const i64 beside = TWO ? place.at(1, at) : 0;
    from[r] = place.at(0, at), target[r] = class_of(weight, place, at, b_c, n);
    take(bias, other, place, at, target[r], s[r]);
#pragma unroll
    for (int h = 0; h < H; ++h) {
      fetch<TX, FULL>(x, from[r], column.x, first_of(h), n, row[r].v[h]);
      if (TWO) fetch<TG, FULL>(other, beside, column.g, first_of(h), n, row[r].g[TWO ? h : 0]);
    }
  }
  if (OP == ADD_RMS_NORM) {
#pragma unroll
    for (int r = 0; r < EACH; ++r)
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const int i = first_of(h);
        const i64 to = (i64)(first + r) * n + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) row[r].v[h][j] = rounded<TG>(add(row[r].v[h][j], row[r].g[TWO ? h : 0][j]));
        if (first + r >= count) continue;
        give<TG, FULL>(second, to, i, n, row[r].v[h]);
      }
  }
  if (BACK && TW != NONE) {
#pragma unroll
    for (int h = 0; h < H; ++h) {
      float w[4];
      fetch<TW, FULL>(weight, 0, column.w, first_of(h), n, w);
#pragma unroll
      for (int r = 0; r < EACH; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j) row[r].g[TWO ? h : 0][j] = mul(row[r].g[TWO ? h : 0][j], w[j]);
    }
  }
  pass<0>(row, n, eps, s);
  if (SINGLE) {
#pragma unroll
    for (int r = 0; r < EACH; ++r)
      if (first + r < count && (threadIdx.x & (W == 1 ? 31 : 32 * W - 1)) == 0)
        conclude(x, from[r], x_c, target[r], out, second, first + r, s[r]);
    return;
  }
  if (OP == RMS_NORM_BACK || OP == LAYER_NORM_BACK) {  // 1 / root and mean of each row, for the gradients of weights
    if (second && (threadIdx.x & (W == 1 ? 31 : 32 * W - 1)) == 0)
#pragma unroll
      for (int r = 0; r < EACH; ++r)
        if (first + r < count)
          ((float2*)second)[first + r] = make_float2(s[r][1], OP == LAYER_NORM_BACK ? s[r][0] : 0.0f);
  }
#pragma unroll
  for (int h = 0; h < H; ++h) {
    const int i = first_of(h);
    float w[4], b[4];
    if (!BACK) fetch<TW, FULL>(weight, 0, column.w, i, n, w);
    fetch<TB, FULL>(bias, 0, column.b, i, n, b);
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
      float y[4];
      results(row[r].v[h], row[r].g[TWO ? h : 0], w, b, s[r], target[r] - i, y);
      const i64 to = (i64)(first + r) * n + i;
      if (first + r >= count) continue;
      give<TO, FULL>(out, to, i, n, y);
    }
  }
}
