// Rows of any length, one block each: every pass reads the row again, in turns from either end, so that it finds in the cache what
// was read last.
//
// Where terms are added, THREADS threads leave a chunk of them in shared memory, 4 * U each, while one warp more walks the lanes of
// the chunk before in order: that warp has nothing else to do, as all others would wait for it.

#include "rows/common.cu"
#include "rows/ops.cu"

#define CHUNK (4 * U * THREADS)
#define ALL (THREADS + 32)
extern __shared__ float memory[];  // 2 * CHUNK terms, 128 lanes

struct Source {
  const void *x, *other, *weight;
  Columns column;
  int n;
};

DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(ALL) : "memory"); }
DEVICE int place_of(int c, int u) { return c * CHUNK + (u * THREADS + threadIdx.x) * 4; }

struct Part {
  Four<TX> x[U];
  Four<TG> other[TWO ? U : 1];
  float v[U][4], g[U][4];
  __device__ __forceinline__ void begin(const Source& s, int c) {  // reads may still be under way afterwards
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i = place_of(c, u);
      read<TX>(s.x, 0, s.column.x, i, s.n, x[u]);
      if constexpr (TWO) read<TG>(s.other, 0, s.column.g, i, s.n, other[u]);
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

DEVICE float largest(const Source& source) {
  Largest<TX> four;
  float one = -infinity();
  for (int c = threadIdx.x < THREADS ? (source.n - 1) / CHUNK & ~1 : -1; c >= 0; c -= 2) {
    Four<TX> x[2 * U];
#pragma unroll
    for (int u = 0; u < 2 * U; ++u) read<TX>(source.x, 0, source.column.x, place_of(c, u), source.n, x[u]);
#pragma unroll
    for (int u = 0; u < 2 * U; ++u) {
      const int left = source.n - place_of(c, u);
      if (left >= 4) {
        four.see(x[u]);
        continue;
      }
      float v[4];
      open<TX>(x[u], v);
#pragma unroll
      for (int j = 0; j < 3; ++j)
        if (j < left) one = fmaxf(one, v[j]);
    }
  }
  return most_of_block<ALL / 32>(fmaxf(one, four.found()), memory + 2 * CHUNK);
}

template <int P> DEVICE void prepare(const Source& source, const float* s) {
  Part part;
  part.begin(source, 0);
  for (int c = 0; c * (i64)CHUNK < source.n; ++c) {
    float* terms = memory + (c & 1) * CHUNK;
    part.finish(source, c);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float t[4];
      changes<0, P>(part.v[u], s);
      terms_of<P>(part.v[u], part.g[TWO ? u : 0], t);
      *(float4*)(terms + place_of(0, u)) = make_float4(t[0], t[1], t[2], t[3]);
    }
    if ((c + 1) * (i64)CHUNK < source.n) part.begin(source, c + 1);
    meet();
  }
}
template <int P> DEVICE void walk(int n) {
  const int first = (threadIdx.x - THREADS) * 4;
  float lanes[4] = {};
  for (int c = 0; c * (i64)CHUNK < n; ++c) {
    const float* terms = memory + (c & 1) * CHUNK + first;
    const int left = n - c * CHUNK, steps = min(left, CHUNK) / 128;
    meet();
#pragma unroll 8
    for (int k = 0; k < steps; ++k) {
      const float4 t = *(const float4*)(terms + k * 128);
      lanes[0] = step<P>(lanes[0], t.x), lanes[1] = step<P>(lanes[1], t.y);
      lanes[2] = step<P>(lanes[2], t.z), lanes[3] = step<P>(lanes[3], t.w);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)  // of the last step, where it is not whole
      if (steps < CHUNK / 128 && steps * 128 + first + j < left) lanes[j] = step<P>(lanes[j], terms[steps * 128 + j]);
  }
  *(float4*)(memory + 2 * CHUNK + first) = make_float4(lanes[0], lanes[1], lanes[2], lanes[3]);
}
template <int P> DEVICE float total(const Source& source, const float* s) {
  if (fold<P>() == LARGEST) return largest(source);
  if (threadIdx.x < THREADS) prepare<P>(source, s);
  else walk<P>(source.n);
  __syncthreads();
  const float sum = meet_shared(memory + 2 * CHUNK);
  __syncthreads();
  return sum;
}

template <int P> DEVICE void pass(const Source& source, float eps, float* s) {
  if constexpr (P < PASSES) {
    settle<P>(total<P>(source, s), (float)source.n, eps, s);
    pass<P + 1>(source, eps, s);
  }
}

extern "C" __global__ void __launch_bounds__(ALL, 1024 / ALL)
rows(const void* x, const void* other, const void* weight, const void* bias, void* out, void* second,
     const __grid_constant__ Place place, i64 x_c, i64 g_c, i64 w_c, i64 b_c, int n, float eps) {
  const Columns column = {x_c, g_c, w_c, b_c};
  wait_for_predecessor();
  release_successor();
  const u32 row = blockIdx.x;
  const i64 from = place.at(0, row);
  const Source source = {behind<TX>(x, from), TWO ? behind<TG>(other, place.at(1, row)) : nullptr, weight, column, n};
  float s[4];
  const int target = class_of(weight, place, row, b_c, n);
  take(bias, other, place, row, target, s);
  pass<0>(source, eps, s);
  if (SINGLE) {
    if (threadIdx.x == 0) conclude(x, from, x_c, target, out, second, row, s);
    return;
  }
  if ((OP == RMS_NORM_BACK || OP == LAYER_NORM_BACK) && second && threadIdx.x == 0)
    ((float2*)second)[row] = make_float2(s[1], OP == LAYER_NORM_BACK ? s[0] : 0.0f);
  if (threadIdx.x >= THREADS) return;
  out = behind<TO>(out, (i64)row * n);
  if (OP == ADD_RMS_NORM) second = behind<TG>(second, (i64)row * n);
  Part part;
  int c = (n - 1) / CHUNK;
  part.begin(source, c);
  for (; c >= 0; --c) {
    part.finish(source, c);
    if (c > 0) part.begin(source, c - 1);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i = place_of(c, u);
      float w[4], b[4], y[4];
      if (!BACK) fetch<TW>(weight, 0, column.w, i, n, w);
      fetch<TB>(bias, 0, column.b, i, n, b);
      if (OP == ADD_RMS_NORM) give<TG>(second, i, i, n, part.v[u]);
      changes<0, PASSES>(part.v[u], s);
      results(part.v[u], part.g[TWO ? u : 0], w, b, s, target - i, y);
      give<TO>(out, i, i, n, y);
    }
  }
}
