// y = softmax(scale * q @ k.T + mask) @ v in float32 fused multiply-adds, for any strides: see contract/attention.py.
//
// Operands   q, k, v of KIND by strides, unit in d; D up to 256 columns of q and k, 32 * NJ of v.
// Order      leaves of 128 keys from `lo`, ascending; s walks d, and [o_n | l_n] the keys, one fma at a time, ascending.
//            What pads d and keys is +0 times -0: fma(+0, -0, x) is x for every x.
// Roles      32 queries to a block, 4 to a warp; a lane has 4 keys of each in s, NJ columns of each in o.
// RANGED     batch entries whose queries start in different places of a leaf: `start` and `stop` are those of each query, and
//            blocks take tiles of the order of attention/ranges.cu in turn. Other entries were computed elsewhere.
#include "attention/common.cu"
#ifndef RANGED
#define RANGED 0
#endif

constexpr int ROWS = 32, THREADS = 256, R = 4, SLICE = 32, DP = (D + 31) / 32 * 32, KP = LEAF + 1;

extern "C" __global__ void __launch_bounds__(THREADS)
attention_fma(const void* q, const void* k, const void* v, const void* mask, const int* start, const int* stop, void* y,
              float* stats, i64 q_b, i64 q_h, i64 q_t, i64 k_b, i64 k_h, i64 k_t, i64 v_b, i64 v_h, i64 v_t, i64 mask_b,
              i64 mask_h, i64 mask_t, i64 mask_k, i64 y_b, i64 y_h, i64 y_t, int tq, int tk, int dv, int group, int offset,
              float c
#if RANGED
              , const int* apart, const int* order, i64 range_b, i64 range_h, i64 range_t, i64 order_b, i64 order_h, int tiles
#endif
) {
  extern __shared__ float memory[];
  float *qs = memory, *ps = qs + ROWS * DP, *slice = ps + ROWS * LEAF;  // slice: of k, then of v
  wait_for_predecessor();
  release_successor();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int heads = gridDim.x, head = blockIdx.x, item = blockIdx.z;
  const i64 q_at = item * q_b + head * q_h, k_at = item * k_b + head / group * k_h, v_at = item * v_b + head / group * v_h;
#if RANGED
  __shared__ int tokens[ROWS], ends[ROWS], bounds[2];
  if (!apart[item]) return;
  for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    __syncthreads();
    if (threadIdx.x < ROWS) {
      const int token = order[item * order_b + head * order_h + tile * ROWS + threadIdx.x];
      const i64 at = item * range_b + head * range_h + token * range_t;
      const int begin = token < 0 ? 0 : start[at], end = token < 0 ? 0 : stop[at];
      tokens[threadIdx.x] = token < 0 ? tq : token, ends[threadIdx.x] = end;
      const int least = __reduce_min_sync(~0u, begin < end ? begin : tk), most = __reduce_max_sync(~0u, end);
      if (threadIdx.x == 0) bounds[0] = least, bounds[1] = most;
    }
    __syncthreads();
    const int lo = bounds[0], hi = bounds[1], end = hi;
#define TOKEN(i) tokens[i]
#define REACH(r) ends[warp * R + r]
#else
  {
    const int tile = gridDim.y - 1 - blockIdx.y, lo = start ? max(start[item], 0) : 0, hi = stop ? min(stop[item], tk) : tk;
    const int end = CAUSAL ? min(hi, min(tq, (tile + 1) * ROWS) + offset) : hi;
#define TOKEN(i) (tile * ROWS + (i))
#define REACH(r) (CAUSAL ? min(hi, row[r] + offset + 1) : hi)
#endif
  for (int at = threadIdx.x; at < ROWS * DP; at += THREADS) {
    const int row = TOKEN(at / DP), d = at % DP;
    qs[at] = row < tq && d < D ? load_as<KIND>(q, q_at + row * q_t + d) : 0.0f;
  }
  int row[R], reach[R];
  float o[R][NJ], l[R], m[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    row[r] = TOKEN(warp * R + r);
    reach[r] = REACH(r);
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
      if (lane + 32 * j < dv) put<OUT>(y, item * y_b + head * y_h + row[r] * y_t + lane + 32 * j, finish(o[r][j], over, l[r]));
    const i64 line = ((i64)item * heads + head) * tq + row[r];
    if (lane == 0 && stats) stats[line] = m[r] + 0.0f, stats[(i64)gridDim.z * heads * tq + line] = canonical(l[r]);
  }
  }
}
