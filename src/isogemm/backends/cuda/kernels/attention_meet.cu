// Sums of leaves meet: o = fma(o_n, b, o * a) for leaves ascending, then y = o / l, rounded once.
//
// sums   [batch, bundles, leaves, rows, dv] of float32, behind it m and l, [2, batch, bundles, leaves, rows]; row r of a
//        bundle is query r / pack of head bundle * pack + r % pack
// y      by strides, unit in dv; stats is [2, batch, heads, tq]: m and l
// A block owns a row. Its first warp finds the factors of 32 leaves at a time, by a scan over their maxima.
#include "attention_steps.cu"

DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void release_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS)
attention_meet(const float* sums, void* y, float* stats, const int* start, const int* stop, i64 y_b, i64 y_h, i64 y_t,
               int tq, int tk, int dv, int heads, int pack, int offset, int batch) {
  constexpr int CHUNK = 128;
  __shared__ float a[CHUNK], b[CHUNK], ls[CHUNK];
  wait_for_predecessor();
  release_successor();
  const int rows = tq * pack, r = blockIdx.x, bundle = blockIdx.y, item = blockIdx.z;
  const int i = r / pack, head = bundle * pack + r % pack, leaves = (tk + LEAF - 1) / LEAF;
  const int lo = start ? max(start[item], 0) : 0;
  int hi = stop ? min(stop[item], tk) : tk;
  if (CAUSAL) hi = min(hi, i + offset + 1);
  const int count = hi > lo ? (hi - lo + LEAF - 1) / LEAF : 0;
  const i64 line = ((i64)(item * gridDim.y + bundle) * leaves) * rows + r, all = (i64)batch * gridDim.y * leaves * rows;
  const float *o_at = sums + line * dv, *m_at = sums + all * dv + line, *l_at = m_at + all;
  const int d = threadIdx.x, lane = threadIdx.x & 31;
  const i64 step = (i64)rows * dv;

  float o = 0.0f, l = 0.0f, m = NONE;
  for (int first = 0; first < count; first += CHUNK) {
    const int n = min(CHUNK, count - first);
    __syncthreads();
    if (threadIdx.x < 32) {
      for (int base = 0; base < n; base += 32) {
        const int leaf = base + lane;
        const float m_n = leaf < n ? m_at[(i64)(first + leaf) * rows] : NONE;
        float before = m_n;  // the largest up to this leaf, then before it
        for (int s = 1; s < 32; s *= 2) {
          const float other = __shfl_up_sync(~0u, before, s);
          if (lane >= s) before = fmaxf(before, other);
        }
        const float last = __shfl_sync(~0u, before, 31);
        before = __shfl_up_sync(~0u, before, 1);
        before = lane ? fmaxf(m, before) : m;
        const Factors f = join(before, m_n);
        if (leaf < n) a[leaf] = f.a, b[leaf] = f.b, ls[leaf] = l_at[(i64)(first + leaf) * rows];
        m = fmaxf(m, last);
      }
    }
    __syncthreads();
    const float* at = o_at + first * step + d;
    for (int base = 0; base < n; base += 16) {  // order-critical: ascending; 16 loads in flight
      float o_n[16];
#pragma unroll
      for (int s = 0; s < 16; ++s) o_n[s] = base + s < n && d < dv ? at[(base + s) * step] : 0.0f;
#pragma unroll
      for (int s = 0; s < 16; ++s)
        if (base + s < n) {
          o = __fmaf_rn(o_n[s], b[base + s], o * a[base + s]);
          l = __fmaf_rn(ls[base + s], b[base + s], l * a[base + s]);
        }
    }
  }
  if (d < dv) store_as<OUT>(y, item * y_b + head * y_h + i * y_t + d, finish(o, __fdiv_rn(1.0f, l), l));
  if (d == 0) {
    const i64 at = ((i64)item * heads + head) * tq + i;
    stats[at] = m + 0.0f;
    stats[(i64)batch * heads * tq + at] = canonical(l);
  }
}
