// Sums of leaves meet: o = fma(o_n, b, o * a) for leaves ascending, then y = o / l, rounded once.
//
// sums   [batch, bundles, leaves, rows, dv] of float32, behind it m and l, [2, batch, bundles, leaves, rows]; row r of a
//        bundle is query r / pack of head bundle * pack + r % pack
// y      by strides, unit in dv; stats is [2, batch, heads, tq]: m and l
// A block owns a row, a thread a column. AT_ONCE leaves are under way at a time, while a warp finds their factors, a lane for
// each: maxima have no order. What is no leaf of the row is (-inf, 0, 0), which changes nothing. Sums behind the last leaf may
// be anything: they are loaded before `stop` is known, not used.
#include "attention/common.cu"

constexpr int TURNS = (AT_ONCE + 31) / 32;  // of a warp over the leaves that are under way

extern "C" __global__ void __launch_bounds__(THREADS)
attention_meet(const float* sums, void* y, float* stats, const int* start, const int* stop, i64 y_b, i64 y_h, i64 y_t,
               int tq, int tk, int dv, int heads, int pack, int offset, int batch) {
  const int rows = tq * pack, r = blockIdx.x, bundle = blockIdx.y, item = blockIdx.z, d = threadIdx.x;
  const int i = r / pack, head = bundle * pack + r % pack, leaves = (tk + LEAF - 1) / LEAF;
  const i64 line = ((i64)(item * gridDim.y + bundle) * leaves) * rows + r, all = (i64)batch * gridDim.y * leaves * rows;
  const float *o_at = sums + line * dv + min(d, dv - 1), *m_at = sums + all * dv + line, *l_at = m_at + all;
  const i64 step = (i64)rows * dv;
  wait_for_predecessor();
  release_successor();
  const int lo = start ? max(start[item], 0) : 0;
  int hi = stop ? min(stop[item], tk) : tk, count = leaves;

  __shared__ float4 shares[AT_ONCE];  // a, b and l_n of each leaf
  float o = 0.0f, l = 0.0f, m = NONE;
  for (int first = 0; first < count; first += AT_ONCE) {
    float o_n[AT_ONCE], l_n[TURNS], m_n[TURNS];
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
      const int s = 32 * t + d, n = first + s;
      const bool some = d < 32 && s < AT_ONCE && n < count;
      m_n[t] = some ? m_at[(i64)n * rows] : NONE, l_n[t] = some ? l_at[(i64)n * rows] : 0.0f;
    }
#pragma unroll
    for (int s = 0; s < AT_ONCE; ++s) o_n[s] = first + s < count ? o_at[(first + s) * step] : 0.0f;
    if (first == 0) {
      if (CAUSAL) hi = min(hi, i + offset + 1);
      count = hi > lo ? (hi - lo + LEAF - 1) / LEAF : 0;
    } else {
      __syncthreads();  // the last shares were read
    }
    if (d < 32) {
#pragma unroll
      for (int t = 0; t < TURNS; ++t) {
        const int s = 32 * t + d;
        const bool some = first + s < count;
        const float own = some ? m_n[t] : NONE;
        float top = own;
#pragma unroll
        for (int reach = 1; reach < 32; reach *= 2) {
          const float other = __shfl_up_sync(~0u, top, reach);
          if (d >= reach) top = fmaxf(top, other);
        }
        const float before = __shfl_up_sync(~0u, top, 1);
        float so_far = d ? fmaxf(m, before) : m;
        const Factors f = join(so_far, own);
        if (s < AT_ONCE) shares[s] = make_float4(f.a, f.b, some ? l_n[t] : 0.0f, 0.0f);
        m = fmaxf(m, __shfl_sync(~0u, top, 31));
      }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < AT_ONCE; ++s) {  // order-critical: ascending
      const float4 f = shares[s];
      o = __fmaf_rn(first + s < count ? o_n[s] : 0.0f, f.y, o * f.x);
      l = __fmaf_rn(f.z, f.y, l * f.x);
    }
  }
  if (d < dv) put<OUT>(y, item * y_b + head * y_h + i * y_t + d, finish(o, __fdiv_rn(1.0f, l), l));
  if (d == 0 && stats) {
    const i64 at = ((i64)item * heads + head) * tq + i;
    stats[at] = m + 0.0f;
    stats[(i64)batch * heads * tq + at] = canonical(l);
  }
}
