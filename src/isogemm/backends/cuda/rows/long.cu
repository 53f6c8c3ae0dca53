// Rows of any length, one block each: every pass reads the row again, in chunks of 4 * U elements a thread.
//
// The terms of a chunk meet in shared memory, where 128 threads walk the lanes in order while the others prepare the next.

#include "rows/common.cu"
#include "rows/ops.cu"

#define CHUNK (4 * U * THREADS)
extern __shared__ float memory[];  // 2 * CHUNK terms, 128 lanes

struct Source {
  const void *x, *other, *weight;
  i64 from, beside;
  Columns column;
  int n;
};

DEVICE int place_of(int c, int u) { return c * CHUNK + (u * THREADS + threadIdx.x) * 4; }

struct Part {
  Four<TX> x[U];
  Four<TG> other[TWO ? U : 1];
  float v[U][4], g[U][4];
  __device__ __forceinline__ void begin(const Source& s, int c) {  // reads may still be under way afterwards
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i = place_of(c, u);
      read<TX>(s.x, s.from, s.column.x, i, s.n, x[u]);
      if constexpr (TWO) read<TG>(s.other, s.beside, s.column.g, i, s.n, other[u]);
    }
  }
  __device__ __forceinline__ void finish(const Source& s, int c) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      open<TX>(x[u], v[u]);
      if constexpr (TWO) {
        float w[4];
        if (BACK) fetch<TW>(s.weight, 0, s.column.w, place_of(c, u), s.n, w);
        open<TG>(other[u], g[u]);
        both(v[u], g[u], w);
      }
    }
  }
};

template <int P, int LAST> DEVICE void changes(float (&v)[4], const float* s) {
  change<P>(v, s);
  if constexpr (P < LAST) changes<P + 1, LAST>(v, s);
}

template <int P> DEVICE float largest(const Source& source) {
  float m = -infinity();
  Part part;
  for (int c = 0; c * (i64)CHUNK < source.n; ++c) {
    part.begin(source, c);
    part.finish(source, c);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (place_of(c, u) + j < source.n) m = fmaxf(m, part.v[u][j]);
  }
  return most_of_block<THREADS / 32>(m, memory + 2 * CHUNK);
}

template <int P> DEVICE float total(const Source& source, const float* s) {
  if (fold<P>() == LARGEST) return largest<P>(source);
  const int n = source.n;
  float lane = 0.0f;
  Part part;
  part.begin(source, 0);
  for (int c = 0; c * (i64)CHUNK < n; ++c) {
    float* terms = memory + (c & 1) * CHUNK;
    part.finish(source, c);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i = place_of(c, u);
      float t[4];
      changes<0, P>(part.v[u], s);
      terms_of<P>(part.v[u], part.g[TWO ? u : 0], t);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j >= n) t[j] = 0.0f;
      *(float4*)(terms + i - c * CHUNK) = make_float4(t[0], t[1], t[2], t[3]);
    }
    if ((c + 1) * (i64)CHUNK < n) part.begin(source, c + 1);
    __syncthreads();  // readers of the other half are behind it
    if (threadIdx.x < 128) {
      const int steps = min((n - c * CHUNK + 127) / 128, CHUNK / 128);
#pragma unroll 16
      for (int k = 0; k < steps; ++k) lane = step<P>(lane, terms[k * 128 + threadIdx.x]);
    }
  }
  float* lanes = memory + 2 * CHUNK;
  if (threadIdx.x < 128) lanes[threadIdx.x] = lane;
  __syncthreads();
  const float sum = meet_shared(lanes);
  __syncthreads();
  return sum;
}

template <int P> DEVICE void pass(const Source& source, float eps, float* s) {
  if constexpr (P < PASSES) {
    settle<P>(total<P>(source, s), (float)source.n, eps, s);
    pass<P + 1>(source, eps, s);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
rows(const void* x, const void* other, const void* weight, const void* bias, void* out, void* second,
     const __grid_constant__ Place place, i64 x_c, i64 g_c, i64 w_c, i64 b_c, int n, float eps) {
  const Columns column = {x_c, g_c, w_c, b_c};
  wait_for_predecessor();
  release_successor();
  const u32 row = blockIdx.x;
  const Source source = {x, other, weight, place.at(0, row), TWO ? place.at(1, row) : 0, column, n};
  float s[4];
  const int target = class_of(weight, place, row, b_c, n);
  take(bias, other, place, row, target, s);
  pass<0>(source, eps, s);
  if (SINGLE) {
    if (threadIdx.x == 0) conclude(x, source.from, x_c, target, out, second, row, s);
    return;
  }
  if ((OP == RMS_NORM_BACK || OP == LAYER_NORM_BACK) && second && threadIdx.x == 0)
    ((float2*)second)[row] = make_float2(s[1], OP == LAYER_NORM_BACK ? s[0] : 0.0f);
  const i64 to = (i64)row * n;
  Part part;
  for (int c = 0; c * (i64)CHUNK < n; ++c) {
    part.begin(source, c);
    part.finish(source, c);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i = place_of(c, u);
      float w[4], b[4], y[4];
      if (!BACK) fetch<TW>(weight, 0, column.w, i, n, w);
      fetch<TB>(bias, 0, column.b, i, n, b);
      if (OP == ADD_RMS_NORM) give<TG>(second, to + i, i, n, part.v[u]);
      changes<0, PASSES>(part.v[u], s);
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = result(part.v[u][j], part.g[u][j], w[j], b[j], s, i + j == target);
      give<TO>(out, to + i, i, n, y);
    }
  }
}
