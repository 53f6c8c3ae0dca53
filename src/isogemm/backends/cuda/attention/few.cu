// A few leaves of attention for few queries, 16 * MT rows of a key head to a block; see contract/attention.py.
//
// Operands   maps of k and v (d, token, head, item), bf16 or fp16, head sizes up to 64 * CHUNKS; q by strides, unit in d.
//            Row r of a bundle is query r / pack of head bundle * pack + r % pack.
// Order      s: d ascending, one mma.sync for 16 of them; [o_n | l_n]: keys ascending. From fresh accumulators.
// Roles      a block walks EACH leaves. It brings the first with two copies at once, and k of the next one while it computes
//            with v, and v when it is done with that, so that three blocks keep a multiprocessor's share of the memory's
//            bandwidth busy. A warp has 32 keys of s, then 16 * CHUNKS columns of o.
// Out        WHOLE: y and stats, of blocks that walk all leaves. Else sums, as attention/meet.cu reads them.
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

// A box that nobody reads again: what else the L2 cache holds, sums of leaves above all, stays there.
DEVICE void load_once(u32 to, const Map* map, u32 bar, int d, int token, int head, int item) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], "
      "[%2], %7;" ::"r"(to), "l"(map), "r"(bar), "r"(d), "r"(token), "r"(head), "r"(item), "l"(policy) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, MT == 4 ? 2 : 3)
attention_few(const __grid_constant__ Map map_k, const __grid_constant__ Map map_v, const u16* q, const u8* mask, const int* start,
              const int* stop, void* y, float* stats, float* sums, i64 q_b, i64 q_h, i64 q_t, i64 mask_b, i64 mask_h, i64 mask_t,
              i64 mask_k, i64 y_b, i64 y_h, i64 y_t, int tq, int tk, int d, int dv, int heads, int group, int pack, int offset,
              int each, float c) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[2];
  const u32 base = (shared(memory) + 1023) & ~1023u, full_k = shared(barriers), full_v = full_k + 8;
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int leaves = (tk + LEAF - 1) / LEAF, parts = (leaves + each - 1) / each, part = blockIdx.x % parts;
  const int row0 = blockIdx.x / parts * ROWS, bundle = blockIdx.y, item = blockIdx.z, rows = tq * pack;
  if (threadIdx.x == 0) {
    map_prefetch(&map_k), map_prefetch(&map_v);
    barrier_init(full_k, 1), barrier_init(full_v, 1);
    barrier_init_fence();
  }
  wait_for_predecessor();
  release_successor();
  const int lo = start ? max(start[item], 0) : 0, hi = stop ? min(stop[item], tk) : tk;
  const int end = CAUSAL ? min(hi, min(tq, (row0 + ROWS - 1) / pack + 1) + offset) : hi;
  const int of_end = end > lo ? (end - lo + LEAF - 1) / LEAF : 0;
  int leaf = part * each;
  const int behind = min(WHOLE ? max(of_end, 1) : of_end, leaf + each);  // y is written, too, where no key is seen
  if (leaf >= behind) return;
  auto bring = [&](const Map* map, u32 to, u32 bar, int n) {
    barrier_expect(bar, CHUNKS * CHUNK);
    for (int i = 0; i < CHUNKS; ++i) load_once(to + i * CHUNK, map, bar, 64 * i, lo + n * LEAF, bundle * pack / group, item);
  };
  if (threadIdx.x == 0) bring(&map_k, base, full_k, leaf), bring(&map_v, base + V_AT, full_v, leaf);
  for (int at = threadIdx.x; at < ROWS * D / 2; at += THREADS) {  // q, zeros around it; d is even
    const int r = row0 + at / (D / 2), j = at % (D / 2) * 2;
    u32 word = 0;
    if (r < rows && j < d) word = *(const u32*)(q + item * q_b + (bundle * pack + r % pack) * q_h + r / pack * q_t + j);
    store_word(base + Q_AT + (r - row0) * Q_STEP + 2 * j, word);
  }
  __syncthreads();

  constexpr int NT = 2 * CHUNKS;  // tiles of 8 columns
  float y_o[MT][NT][4], y_l[MT][2], y_m[MT][2];  // of the leaves so far
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      y_l[i][r] = 0.0f, y_m[i][r] = NONE;
#pragma unroll
      for (int j = 0; j < NT; ++j) y_o[i][j][2 * r] = y_o[i][j][2 * r + 1] = 0.0f;
    }
#pragma unroll 1
  for (u32 parity = 0; leaf < behind; ++leaf, parity ^= 1) {
    const int first = lo + leaf * LEAF;
    const bool more = threadIdx.x == 0 && leaf + 1 < behind;
    float s[MT][4][4];
#pragma unroll
    for (int i = 0; i < MT * 16; ++i) s[i / 16][i / 4 % 4][i % 4] = 0.0f;
    barrier_wait(full_k, parity);
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
    if (more) bring(&map_k, base, full_k, leaf + 1);
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
    barrier_wait(full_v, parity);
    if (stop && first + LEAF > hi) {  // behind `stop`: brought, but no part of the walk
      for (int at = threadIdx.x; at < CHUNKS * LEAF * 32; at += THREADS)
        if (first + at / 32 % LEAF >= hi) store_word(base + V_AT + at / (32 * LEAF) * CHUNK + at % (32 * LEAF) * 4, 0);
    }
    __syncthreads();

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

    __syncthreads();
    if (more) bring(&map_v, base + V_AT, full_v, leaf + 1);
    const i64 all = (i64)gridDim.z * gridDim.y * leaves * rows;
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + 16 * i + 8 * r + (lane >> 2);
        if (WHOLE) {
          if (CAUSAL && first >= row / pack + offset + 1) continue;  // no part of this row's walk, whatever v is
          const Factors f = join(y_m[i][r], m_n[i][r]);
#pragma unroll
          for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) y_o[i][j][e] = __fmaf_rn(o[i][j][e], f.b, y_o[i][j][e] * f.a);
          y_l[i][r] = __fmaf_rn(l[i][2 * r], f.b, y_l[i][r] * f.a);
        } else if (row < rows) {
          const i64 line = ((i64)(item * gridDim.y + bundle) * leaves + leaf) * rows + row;
          const int column = warp * 16 * CHUNKS + (lane & 3) * 2;
#pragma unroll
          for (int j = 0; j < NT; ++j)
            if (column + 8 * j < dv) *(float2*)(sums + line * dv + column + 8 * j) = make_float2(o[i][j][2 * r], o[i][j][2 * r + 1]);
          if (warp == 0 && (lane & 3) == 0) sums[all * dv + line] = m_n[i][r], sums[all * (dv + 1) + line] = l[i][2 * r];
        }
      }
  }
  if (!WHOLE) return;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + 16 * i + 8 * r + (lane >> 2), head = bundle * pack + row % pack, query = row / pack;
      if (row >= rows) continue;
      const float over = __fdiv_rn(1.0f, y_l[i][r]);
#pragma unroll
      for (int j = 0; j < NT * 2; ++j) {
        const int at = warp * 16 * CHUNKS + (lane & 3) * 2 + j / 2 * 8 + j % 2;
        if (at < dv) put<OUT>(y, item * y_b + head * y_h + query * y_t + at, finish(y_o[i][j / 2][2 * r + j % 2], over, y_l[i][r]));
      }
      const i64 line = ((i64)item * heads + head) * tq + query;
      if (warp == 0 && (lane & 3) == 0 && stats)
        stats[line] = y_m[i][r] + 0.0f, stats[(i64)gridDim.z * heads * tq + line] = canonical(y_l[i][r]);
    }
}
