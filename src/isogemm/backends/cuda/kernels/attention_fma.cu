// y = softmax(scale * q @ k.T + mask) @ v in float32 fused multiply-adds, for any strides: see contract/attention.py.
//
// Operands   q, k, v of KIND by strides, unit in d; D up to 256 columns of q and k, 32 * NJ of v.
// Order      leaves of 128 keys from `lo`, ascending; s walks d, and [o_n | l_n] the keys, one fma at a time, ascending.
//            What pads d and keys is +0 times -0: fma(+0, -0, x) is x for every x.
// Roles      32 queries to a block, 4 to a warp; a lane has 4 keys of each in s, NJ columns of each in o.
#include "attention_steps.cu"

DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void release_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

constexpr int ROWS = 32, THREADS = 256, R = 4, SLICE = 32, DP = (D + 31) / 32 * 32, KP = LEAF + 1;

extern "C" __global__ void __launch_bounds__(THREADS)
attention_fma(const void* q, const void* k, const void* v, const void* mask, const int* start, const int* stop, void* y,
              float* stats, i64 q_b, i64 q_h, i64 q_t, i64 k_b, i64 k_h, i64 k_t, i64 v_b, i64 v_h, i64 v_t, i64 mask_b,
              i64 mask_h, i64 mask_t, i64 mask_k, i64 y_b, i64 y_h, i64 y_t, int tq, int tk, int dv, int group, int offset,
              float c) {
  extern __shared__ float memory[];
  float *qs = memory, *ps = qs + ROWS * DP, *slice = ps + ROWS * LEAF;  // slice: of k, then of v
  wait_for_predecessor();
  release_successor();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int heads = gridDim.x, head = blockIdx.x, item = blockIdx.z, tile = gridDim.y - 1 - blockIdx.y;
  const i64 q_at = item * q_b + head * q_h, k_at = item * k_b + head / group * k_h, v_at = item * v_b + head / group * v_h;
  const int lo = start ? max(start[item], 0) : 0, hi = stop ? min(stop[item], tk) : tk;
  const int end = CAUSAL ? min(hi, min(tq, (tile + 1) * ROWS) + offset) : hi;
  for (int at = threadIdx.x; at < ROWS * DP; at += THREADS) {
    const int row = tile * ROWS + at / DP, d = at % DP;
    qs[at] = row < tq && d < D ? load_as<KIND>(q, q_at + row * q_t + d) : 0.0f;
  }
  int row[R], reach[R];
  float o[R][NJ], l[R], m[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    row[r] = tile * ROWS + warp * R + r;
    reach[r] = CAUSAL ? min(hi, row[r] + offset + 1) : hi;
    l[r] = 0.0f, m[r] = NONE;
#pragma unroll
    for (int j = 0; j < NJ; ++j) o[r][j] = 0.0f;
  }

  for (int first = lo; first < end; first += LEAF) {
    float s[R][4];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[r][j] = 0.0f;
    for (int d0 = 0; d0 < DP; d0 += SLICE) {  // order-critical: d ascending
      __syncthreads();
      for (int key = warp; key < LEAF; key += 8)
        slice[lane * KP + key] = first + key < hi && d0 + lane < D ? load_as<KIND>(k, k_at + (first + key) * k_t + d0 + lane) : -0.0f;
      __syncthreads();
#pragma unroll
      for (int d = 0; d < SLICE; d += 4) {
        float4 x[R];
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] = *(const float4*)&qs[(warp * R + r) * DP + d0 + d];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float w = slice[(d + i) * KP + lane + 32 * j];
#pragma unroll
            for (int r = 0; r < R; ++r) s[r][j] = __fmaf_rn(i == 0 ? x[r].x : i == 1 ? x[r].y : i == 2 ? x[r].z : x[r].w, w, s[r][j]);
          }
      }
    }
    float m_n[R], o_n[R][NJ], l_n[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float top = NONE;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = first + lane + 32 * j;
        s[r][j] = s[r][j] * c;
        if (MASK && row[r] < tq && key < hi) {
          const i64 at = item * mask_b + head * mask_h + row[r] * mask_t + key * mask_k;
          if (MASK == 1 && !((const unsigned char*)mask)[at]) s[r][j] = NONE;
          if (MASK == 2) s[r][j] = s[r][j] + load_as<MASK_KIND>(mask, at) * LOG2E;
        }
        if (key >= reach[r]) s[r][j] = NONE;
        top = fmaxf(top, s[r][j]);
      }
#pragma unroll
      for (int w = 16; w; w /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
      m_n[r] = ceilf(top), l_n[r] = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) ps[(warp * R + r) * LEAF + lane + 32 * j] = rounded<KIND>(exp2_of(s[r][j] - finite(m_n[r])));
#pragma unroll
      for (int j = 0; j < NJ; ++j) o_n[r][j] = 0.0f;
    }
    for (int key0 = 0; key0 < LEAF && first + key0 < hi; key0 += SLICE) {  // order-critical: keys ascending
      __syncthreads();
      for (int key = warp; key < SLICE; key += 8)
#pragma unroll
        for (int j = 0; j < NJ; ++j)
          slice[key * 32 * NJ + lane + 32 * j] =
              first + key0 + key < hi && lane + 32 * j < dv ? load_as<KIND>(v, v_at + (first + key0 + key) * v_t + lane + 32 * j) : -0.0f;
      __syncthreads();
#pragma unroll 2
      for (int key = 0; key < SLICE; key += 4) {
        float4 x[R];
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] = *(const float4*)&ps[(warp * R + r) * LEAF + key0 + key];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float p[R];
#pragma unroll
          for (int r = 0; r < R; ++r) {
            p[r] = i == 0 ? x[r].x : i == 1 ? x[r].y : i == 2 ? x[r].z : x[r].w;
            l_n[r] = __fadd_rn(l_n[r], p[r]);  // fma(p, 1, l_n)
          }
#pragma unroll
          for (int j = 0; j < NJ; ++j) {
            const float w = slice[(key + i) * 32 * NJ + lane + 32 * j];
#pragma unroll
            for (int r = 0; r < R; ++r) o_n[r][j] = __fmaf_rn(p[r], w, o_n[r][j]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first >= reach[r]) continue;  // a leaf behind all that a row may see is no part of its walk
      const Factors f = join(m[r], m_n[r]);
      l[r] = __fmaf_rn(l_n[r], f.b, l[r] * f.a);
#pragma unroll
      for (int j = 0; j < NJ; ++j) o[r][j] = __fmaf_rn(o_n[r][j], f.b, o[r][j] * f.a);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (row[r] >= tq) continue;
    const float over = __fdiv_rn(1.0f, l[r]);
#pragma unroll
    for (int j = 0; j < NJ; ++j)
      if (lane + 32 * j < dv) store_as<OUT>(y, item * y_b + head * y_h + row[r] * y_t + lane + 32 * j, finish(o[r][j], over, l[r]));
    const i64 line = ((i64)item * heads + head) * tq + row[r];
    if (lane == 0 && stats) stats[line] = m[r] + 0.0f, stats[(i64)gridDim.z * heads * tq + line] = canonical(l[r]);
  }
}
