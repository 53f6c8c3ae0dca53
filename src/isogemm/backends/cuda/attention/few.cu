// One leaf of attention for few queries, 16 * MT rows of a key head to a block; see contract/attention.py.
//
// Operands   maps of k and v (d, token, head, item), bf16 or fp16, head sizes up to 64 * CHUNKS; q by strides, unit in d.
//            Row r of a bundle is query r / pack of head bundle * pack + r % pack.
// Order      s: d ascending, one mma.sync for 16 of them; [o_n | l_n]: keys ascending. From fresh accumulators.
// Roles      a block brings its leaf with two copies at once, so that three blocks keep a multiprocessor's share of the
//            memory's bandwidth busy. A warp has 32 keys of s, then 16 * CHUNKS columns of o.
// Out        ONLY: y and stats, for caches of one leaf. Else sums, as attention/meet.cu reads them.
#include "attention/common.cu"

constexpr int THREADS = 128, ROWS = 16 * MT, D = 64 * CHUNKS, CHUNK = 16384, Q_STEP = 2 * D + 16, P_STEP = 2 * LEAF + 16;
constexpr u32 V_AT = CHUNKS * CHUNK, Q_AT = 2 * V_AT, P_AT = Q_AT + ROWS * Q_STEP, TOP_AT = P_AT + ROWS * P_STEP;

DEVICE void matrices(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
DEVICE void matrices_across(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if KIND == 1
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Column d of a key, in chunks of 64 columns whose rows of 128 bytes are swizzled.
DEVICE u32 place(u32 base, int key, int d) { return base + d / 64 * CHUNK + key * 128 + ((d % 64 / 8 ^ key & 7) << 4); }
DEVICE void store_word(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEVICE float load_float(u32 at) { float x; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory"); return x; }

extern "C" __global__ void __launch_bounds__(THREADS)
attention_few(const __grid_constant__ Map map_k, const __grid_constant__ Map map_v, const u16* q, const u8* mask, const int* start,
              const int* stop, void* y, float* stats, float* sums, i64 q_b, i64 q_h, i64 q_t, i64 mask_b, i64 mask_h, i64 mask_t,
              i64 mask_k, i64 y_b, i64 y_h, i64 y_t, int tq, int tk, int d, int dv, int heads, int group, int pack, int offset,
              float c) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[2];
  const u32 base = (shared(memory) + 1023) & ~1023u, full_k = shared(barriers), full_v = full_k + 8;
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int leaves = (tk + LEAF - 1) / LEAF, leaf = blockIdx.x % leaves, row0 = blockIdx.x / leaves * ROWS;
  const int bundle = blockIdx.y, item = blockIdx.z, rows = tq * pack;
  if (threadIdx.x == 0) {
    barrier_init(full_k, 1), barrier_init(full_v, 1);
    barrier_init_fence();
  }
  wait_for_predecessor();
  release_successor();
  const int lo = start ? max(start[item], 0) : 0, hi = stop ? min(stop[item], tk) : tk;
  const int first = lo + leaf * LEAF, end = CAUSAL ? min(hi, min(tq, (row0 + ROWS - 1) / pack + 1) + offset) : hi;
  if (!ONLY && first >= end) return;
  if (threadIdx.x == 0) {
    barrier_expect(full_k, CHUNKS * CHUNK), barrier_expect(full_v, CHUNKS * CHUNK);
    for (int i = 0; i < CHUNKS; ++i) load_box(base + i * CHUNK, &map_k, full_k, 64 * i, first, bundle * pack / group, item);
    for (int i = 0; i < CHUNKS; ++i) load_box(base + V_AT + i * CHUNK, &map_v, full_v, 64 * i, first, bundle * pack / group, item);
  }
  for (int at = threadIdx.x; at < ROWS * D / 2; at += THREADS) {  // q, zeros around it; d is even
    const int r = row0 + at / (D / 2), j = at % (D / 2) * 2;
    u32 word = 0;
    if (r < rows && j < d) word = *(const u32*)(q + item * q_b + (bundle * pack + r % pack) * q_h + r / pack * q_t + j);
    store_word(base + Q_AT + (r - row0) * Q_STEP + 2 * j, word);
  }
  __syncthreads();

  float s[MT][4][4];
#pragma unroll
  for (int i = 0; i < MT * 16; ++i) s[i / 16][i / 4 % 4][i % 4] = 0.0f;
  barrier_wait(full_k, 0);
#pragma unroll
  for (int kk = 0; kk < D; kk += 16) {  // order-critical: d ascending
    u32 b[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) matrices(b[j], place(base, 32 * warp + 16 * j + (lane >> 4) * 8 + (lane & 7), kk + (lane >> 3 & 1) * 8));
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      u32 a[4];
      matrices(a, base + Q_AT + (16 * i + (lane & 15)) * Q_STEP + 2 * (kk + (lane >> 4) * 8));
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(s[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }

  float m_n[MT][2], u[MT][2];
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int tile_row = 16 * i + 8 * r + (lane >> 2), row = row0 + tile_row, query = row / pack;
      const int reach = CAUSAL ? min(hi, query + offset + 1) : hi;
      float top = NONE;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& t = s[i][j / 2][2 * r + j % 2];
        const int key = first + 32 * warp + j / 2 * 8 + (lane & 3) * 2 + j % 2;
        t = t * c;
        if (MASK && row < rows && key < hi) {
          const i64 at = item * mask_b + (bundle * pack + row % pack) * mask_h + query * mask_t + key * mask_k;
          if (MASK == 1 && !mask[at]) t = NONE;
          if (MASK == 2) t = t + load_as<MASK_KIND>(mask, at) * LOG2E;
        }
        if (key >= reach) t = NONE;
        top = fmaxf(top, t);
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      if ((lane & 3) == 0) store_word(base + TOP_AT + 4 * (warp * ROWS + tile_row), __float_as_int(top));
    }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * i + 8 * r + (lane >> 2);
      float top = NONE;
#pragma unroll
      for (int w = 0; w < 4; ++w) top = fmaxf(top, load_float(base + TOP_AT + 4 * (w * ROWS + row)));
      m_n[i][r] = ceilf(top), u[i][r] = finite(m_n[i][r]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        store_word(base + P_AT + row * P_STEP + 2 * (32 * warp + 8 * j + (lane & 3) * 2),
                   narrow<KIND>(exp2_of(s[i][j][2 * r] - u[i][r]), exp2_of(s[i][j][2 * r + 1] - u[i][r])));
    }
  barrier_wait(full_v, 0);
  if (stop && first + LEAF > hi)  // behind `stop`: brought, but no part of the walk
    for (int at = threadIdx.x; at < CHUNKS * LEAF * 32; at += THREADS)
      if (first + at / 32 % LEAF >= hi) store_word(base + V_AT + at / (32 * LEAF) * CHUNK + at % (32 * LEAF) * 4, 0);
  __syncthreads();

  constexpr int NT = 2 * CHUNKS;  // tiles of 8 columns
  float o[MT][NT][4], l[MT][4];
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      l[i][e] = 0.0f;
#pragma unroll
      for (int j = 0; j < NT; ++j) o[i][j][e] = 0.0f;
    }
  constexpr u32 ones = KIND == 1 ? 0x3f803f80 : 0x3c003c00;
#pragma unroll
  for (int kk = 0; kk < LEAF; kk += 16) {  // order-critical: keys ascending
    u32 b[CHUNKS][4];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
      matrices_across(b[j], place(base + V_AT, kk + (lane >> 3 & 1) * 8 + (lane & 7), (warp * CHUNKS + j) * 16 + (lane >> 4) * 8));
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      u32 a[4];
      matrices(a, base + P_AT + (16 * i + (lane & 15)) * P_STEP + 2 * (kk + (lane >> 4) * 8));
#pragma unroll
      for (int j = 0; j < NT; ++j) mma(o[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      mma(l[i], a, ones, ones);
    }
  }

  const i64 all = (i64)gridDim.z * gridDim.y * leaves * rows;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + 16 * i + 8 * r + (lane >> 2), head = bundle * pack + row % pack, query = row / pack;
      if (row >= rows) continue;
      const int column = warp * 16 * CHUNKS + (lane & 3) * 2;
      if (ONLY) {
        float m = NONE;
        const Factors f = join(m, m_n[i][r]);
        const float sum = __fmaf_rn(l[i][2 * r], f.b, 0.0f * f.a), over = __fdiv_rn(1.0f, sum);
#pragma unroll
        for (int j = 0; j < NT * 2; ++j) {
          const int at = column + j / 2 * 8 + j % 2;
          const float x = __fmaf_rn(o[i][j / 2][2 * r + j % 2], f.b, 0.0f * f.a);
          if (at < dv) put<OUT>(y, item * y_b + head * y_h + query * y_t + at, finish(x, over, sum));
        }
        const i64 line = ((i64)item * heads + head) * tq + query;
        if (warp == 0 && (lane & 3) == 0 && stats) stats[line] = m + 0.0f, stats[(i64)gridDim.z * heads * tq + line] = canonical(sum);
      } else {
        const i64 line = ((i64)(item * gridDim.y + bundle) * leaves + leaf) * rows + row;
#pragma unroll
        for (int j = 0; j < NT; ++j)
          if (column + 8 * j < dv) *(float2*)(sums + line * dv + column + 8 * j) = make_float2(o[i][j][2 * r], o[i][j][2 * r + 1]);
        if (warp == 0 && (lane & 3) == 0) sums[all * dv + line] = m_n[i][r], sums[all * (dv + 1) + line] = l[i][2 * r];
      }
    }
}
