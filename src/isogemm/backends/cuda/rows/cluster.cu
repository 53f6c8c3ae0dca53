// Long rows, each read once and held by a cluster of eight blocks: block b has lanes 16 b to 16 b + 15, and walks them.
//
// What a pass finds (sums of lanes, the largest) every block writes to all of them, into a place of that pass's own.

#include "rows/common.cu"
#include "rows/ops.cu"

#define BLOCKS 8
#define LANES (128 / BLOCKS)
#define AHEAD 4
extern __shared__ float memory[];  // LANES * steps values v; as many g, terms, where there are any; 128 lanes of each pass

constexpr bool TERMS = OP == LOG_SOFTMAX;  // terms that cost more than a walker can spend
struct Held {
  float *v, *g, *terms, *lanes;
  int n, steps, rank;
};

DEVICE void arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// To the same place in the shared memory of every block.
DEVICE void tell(float* place, float value) {
  const u32 here = (u32)__cvta_generic_to_shared(place);
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
  }
}
// Where in the row group q of four elements is.
DEVICE int element(const Held& held, int q) { return q / (LANES / 4) * 128 + held.rank * LANES + q % (LANES / 4) * 4; }
DEVICE void get(const float* from, int q, float* v) {
  const float4 f = *(const float4*)(from + 4 * q);
  v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
}
DEVICE void set(float* to, int q, const float* v) { *(float4*)(to + 4 * q) = make_float4(v[0], v[1], v[2], v[3]); }

template <int P> DEVICE float largest(const Held& held, int groups) {
  float m = -infinity();
  for (int q = threadIdx.x; q < groups; q += THREADS)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (element(held, q) + j < held.n) m = fmaxf(m, held.v[4 * q + j]);
  __shared__ float warps[THREADS / 32];
  m = most(m);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = m;
  __syncthreads();
  if (threadIdx.x < 32) {
    m = most(threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : -infinity());
    if (threadIdx.x == 0) tell(held.lanes + 128 * P + held.rank, m);
  }
  arrive();
  wait();
  return most((threadIdx.x & 31) < BLOCKS ? held.lanes[128 * P + (threadIdx.x & 31)] : -infinity());
}

template <int P> DEVICE float total(const Held& held, int groups) {
  if (fold<P>() == LARGEST) return largest<P>(held, groups);
  if (TERMS) {
    for (int q = threadIdx.x; q < groups; q += THREADS) {
      float v[4], t[4];
      get(held.v, q, v);
      terms_of<P>(v, v, t);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (element(held, q) + j >= held.n) t[j] = 0.0f;
      set(held.terms, q, t);
    }
  }
  __syncthreads();
  if (threadIdx.x < LANES) {
    const int lane = held.rank * LANES + threadIdx.x, steps = lane < held.n ? (held.n - lane + 127) / 128 : 0;
    float sum = 0.0f;
#pragma unroll 16
    for (int k = 0; k < steps; ++k) {
      const int at = k * LANES + threadIdx.x;
      sum = step<P>(sum, TERMS ? held.terms[at] : term<P>(held.v[at], TWO ? held.g[at] : 0.0f));
    }
    tell(held.lanes + 128 * P + lane, sum);
  }
  arrive();
  wait();
  return meet_shared(held.lanes + 128 * P);
}

template <int P> DEVICE void pass(const Held& held, int groups, float eps, float* s) {
  if constexpr (P < PASSES) {
    if constexpr (P > 0) {
      for (int q = threadIdx.x; q < groups; q += THREADS) {
        float v[4];
        get(held.v, q, v);
        change<P>(v, s);
        set(held.v, q, v);
      }
    }
    settle<P>(total<P>(held, groups), (float)held.n, eps, s);
    pass<P + 1>(held, groups, eps, s);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
rows(const void* x, const void* other, const void* weight, const void* bias, void* out, void* second,
     const __grid_constant__ Place place, i64 x_c, i64 g_c, i64 w_c, i64 b_c, int n, float eps) {
  const int steps = (n + 127) / 128, groups = steps * LANES / 4, size = steps * LANES;
  const Held held = {memory, memory + size, memory + size, memory + size * (TWO || TERMS ? 2 : 1), n, steps, (int)cluster_rank()};
  const u32 row = blockIdx.x / BLOCKS;
  arrive();
  wait_for_predecessor();
  release_successor();
  const i64 from = place.at(0, row), beside = TWO ? place.at(1, row) : 0, to = (i64)row * n;
  for (int first = threadIdx.x; first < groups; first += AHEAD * THREADS) {
    Four<TX> a[AHEAD];
    Four<TG> b[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int q = first + k * THREADS, i = q < groups ? element(held, q) : n;
      read<TX>(x, from, x_c, i, n, a[k]);
      if (TWO) read<TG>(other, beside, g_c, i, n, b[k]);
    }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int q = first + k * THREADS;
      if (q >= groups) continue;
      float v[4], g[4], w[4];
      open<TX>(a[k], v);
      if (TWO) {
        open<TG>(b[k], g);
        if (BACK) several<TW>(weight, 0, w_c, element(held, q), n, w);
        both(v, g, w);
        if (OP == ADD_RMS_NORM) give<TG>(second, to + element(held, q), element(held, q), n, v);
        set(held.g, q, g);
      }
      set(held.v, q, v);
    }
  }
  __syncthreads();
  wait();  // every block of the cluster is there
  float s[4];
  const int target = class_of(weight, place, row, b_c, n);
  take(bias, other, place, row, target, s);
  pass<0>(held, groups, eps, s);
  if (SINGLE) {
    if (held.rank == 0 && threadIdx.x == 0) conclude(x, from, x_c, target, out, second, row, s);
    return;
  }
  if ((OP == RMS_NORM_BACK || OP == LAYER_NORM_BACK) && second && held.rank == 0 && threadIdx.x == 0)
    ((float2*)second)[row] = make_float2(s[1], OP == LAYER_NORM_BACK ? s[0] : 0.0f);
  for (int q = threadIdx.x; q < groups; q += THREADS) {
    const int i = element(held, q);
    if (i >= n) continue;
    float v[4], g[4], w[4], b[4], y[4];
    get(held.v, q, v);
    if (TWO) get(held.g, q, g);
    if (!BACK) several<TW>(weight, 0, w_c, i, n, w);
    several<TB>(bias, 0, b_c, i, n, b);
    change<PASSES>(v, s);
    results(v, g, w, b, s, target - i, y);
    give<TO>(out, to + i, i, n, y);
  }
}
