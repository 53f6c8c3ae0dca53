// y = softmax(scale * q @ k.T + mask) @ v on wgmma, fed by the tensor copy engine: see contract/attention.py.
//
// Operands   maps of q, k and v (d, token, head, item), bf16 or fp16, head sizes up to 64 * CHUNKS; beyond d the engine
//            brings zeros, which a fused sum ignores. y by strides, unit in d.
// Order      leaves of 128 keys from `lo`, ascending. Fresh accumulators for s and for [o_n | l_n] in every leaf, one
//            instruction for 16 of K, ascending. The ones of l_n are a tile of shared memory behind the columns of v.
// Roles      two warpgroups of 64 queries each walk the same leaves. One thread of a third fills two buffers for k and two
//            for v, and is a tile of queries ahead: a block takes tiles until there are none. Three warpgroups of fewer
//            registers were slower (H200, 4096 queries of 16 heads of 128: 183 us, not 156), and turns for products no gain.
// Shared     chunks of 64 columns x 128 keys, 16 KB each. In a buffer of v they lie at equal distances from each other and
//            from the ones, which so follow the last column of either buffer: that distance is part of a descriptor.
// After attention/common.cu and the instructions mma_s and mma_o, which attention/hopper.py writes.

constexpr int WARPGROUPS = 2, THREADS = 128 * WARPGROUPS + 128, BM = 64 * WARPGROUPS, CHUNK = 16384;
constexpr int FEWER = 40, MORE = 232;  // registers of a thread
// Whoever asks for more than the block was launched with waits forever.
static_assert(128 * (FEWER + WARPGROUPS * MORE) <= 65536 / THREADS / 8 * 8 * THREADS);
constexpr int NV = 32 * CHUNKS + 4;  // accumulators of [o_n | l_n]: 64 * CHUNKS + 8 columns
#if CHUNKS == 2
constexpr u32 V_AT[2] = {4 * CHUNK, 0}, V_STEP[2] = {CHUNK, 3 * CHUNK}, K_AT[2] = {CHUNK, 7 * CHUNK}, ONES = 6 * CHUNK, Q_AT = 9 * CHUNK;
#else
constexpr u32 V_AT[2] = {CHUNK, 0}, V_STEP[2] = {CHUNK, 2 * CHUNK}, K_AT[2] = {3 * CHUNK, 4 * CHUNK}, ONES = 2 * CHUNK, Q_AT = 5 * CHUNK;
#endif

// Which of the two buffers is next, and the parity of its barriers.
struct Buffers {
  u32 k = K_AT[0], v = V_AT[0], step = V_STEP[0], barrier = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    k = K_AT[0] + K_AT[1] - k, v = V_AT[0] + V_AT[1] - v, step = V_STEP[0] + V_STEP[1] - step;
    parity ^= barrier >> 3, barrier ^= 8;
  }
};

DEVICE u64 descriptor_of(u32 address, u32 step) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(step >> 4) << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}

struct Walk {
  const u8* mask;  // of this item and head
  i64 mask_t, mask_k;
  int hi, reach[2], row[2], tq;
  float c;
};

// Whether a bool mask hides nothing of a leaf from a warp's rows; false, too, where that cannot be read 16 bytes at a time.
DEVICE bool all_seen(const Walk& w, int first, int lane) {
  bool all = w.mask_k == 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u8* at = w.mask + w.row[r] * w.mask_t + first + (lane & 3) * 32;
    if (w.row[r] >= w.tq || !all) continue;
    all = ((u64)at & 15) == 0;
    if (!all) continue;
    const uint4 x = ((const uint4*)at)[0], z = ((const uint4*)at)[1];
    all = (x.x & x.y & x.z & x.w & z.x & z.y & z.z & z.w) == 0x01010101;
  }
  return __all_sync(~0u, all);
}

// Where a thread's accumulator i lies: row of its two, key of the leaf.
DEVICE constexpr int row_of(int i) { return i >> 1 & 1; }
DEVICE int key_of(int i, int lane) { return i / 4 * 8 + (lane & 3) * 2 + (i & 1); }

// exp2's polynomial at -r / UNIT: r is in units of 2**-24, the least subnormal number of 16 bits.
constexpr float TERM[] = {TERMS}, UNIT = 0x1p-24f, UNITS[] = {1.0f, -0x1p24f, 0x1p48f, -0x1p72f, 0x1p96f};
constexpr int DEGREE = sizeof(TERM) / sizeof(float) - 1;
DEVICE float power_of_rest(float r) {
  float y = TERM[0] * UNITS[DEGREE];
#pragma unroll
  for (int i = 1; i <= DEGREE; ++i) y = __fmaf_rn(y, r, TERM[i] * UNITS[DEGREE - i]);
  return y;
}

// p and m_n of a leaf without an edge in 10 instructions for a score, where each row has a score of at least 0, c is not tiny
// and the whole parts of all x = m_n - t are at most 124; false elsewhere, and then p and m_n are rubbish.
//
// Scores of at least 0 are ordered as their bits are, which the maximum of three takes. In units of 2**-24, x narrowed to 16
// bits is subnormal: it is rounded to its whole part, whose bits are that number, and a register has two of them. An x between
// two whole numbers goes to the even one here, to the odd one in exp2_of. Both give the same p: 2**-0.5, by the polynomial
// at either end, is far from where rounding to p's type changes.
//
// Four scores wait for a rest of the four before them, by a `step` that does not change: products of the other warpgroup want
// the cycles in which nothing is issued here, and there are none where the compiler is free.
DEVICE bool quick_softmax(const float (&s)[64], u32 (&p)[32], float (&m_n)[2], float c) {
  int top[2] = {-1, -1};
#pragma unroll
  for (int i = 0; i < 64; i += 2) top[row_of(i)] = max(max(top[row_of(i)], __float_as_int(s[i])), __float_as_int(s[i + 1]));
  float u[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = max(top[r], __shfl_xor_sync(~0u, top[r], 1));
    top[r] = max(top[r], __shfl_xor_sync(~0u, top[r], 2));
    m_n[r] = ceilf(__int_as_float(top[r]) * c), u[r] = m_n[r] * UNIT;
  }
  const float nothing = c * 0.0f;
  float step = c * UNIT;
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    u32 whole[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float x = u[r] - s[2 * (i + r)] * step, z = u[r] - s[2 * (i + r) + 1] * step;
      whole[r] = pack_f16(x, z);
      const float rest = x - f16_to_float(whole[r]), y = power_of_rest(rest), w = power_of_rest(z - f16_to_float(whole[r] >> 16));
      if (r == 1) step = __fmaf_rn(rest, nothing, step);
      if (KIND == 1) p[i + r] = narrow<KIND>(y, w) - (whole[r] << 7);
      else p[i + r] = narrow<KIND>(__int_as_float(__float_as_int(y) - (whole[r] << 23)), __int_as_float(__float_as_int(w) - (whole[r] >> 16 << 23)));
    }
    most = __vimax3_u16x2(most, whole[0], whole[1]);
  }
  return min(top[0], top[1]) >= 0 && c >= 0x1p-100f && max(most & 0xffff, most >> 16) <= 124;
}

// Steps 1 and 2: t, the maxima m_n, and p rounded. EDGE: some row does not see all keys, or there is a mask.
template <bool EDGE> DEVICE void softmax(float (&s)[64], u32 (&p)[32], float (&m_n)[2], const Walk& w, int first, int lane) {
  if (!EDGE && __all_sync(~0u, quick_softmax(s, p, m_n, w.c))) return;
  float top[2] = {NONE, NONE};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = s[i] * w.c;
    if (EDGE) {
      const int r = row_of(i), key = first + key_of(i, lane);
      if (MASK == 1 && w.row[r] < w.tq && key < w.hi && !w.mask[w.row[r] * w.mask_t + key * w.mask_k]) s[i] = NONE;
      if (MASK == 2 && w.row[r] < w.tq && key < w.hi)
        s[i] = s[i] + load_as<MASK_KIND>(w.mask, w.row[r] * w.mask_t + key * w.mask_k) * LOG2E;
      if (key >= w.reach[r]) s[i] = NONE;
    }
    top[row_of(i)] = fmaxf(top[row_of(i)], s[i]);
  }
  float u[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
    m_n[r] = ceilf(top[r]), u[r] = finite(m_n[r]);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = narrow<KIND>(exp2_of(s[2 * i] - u[i & 1]), exp2_of(s[2 * i + 1] - u[i & 1]));
}

// v of keys from `left` on as zeros: the copy engine brought them, but they are behind `stop`.
DEVICE void clear_behind(u32 v, u32 step, int left, u32 thread, u32 turn) {
  for (int i = thread; i < CHUNKS * (128 - left) * 8; i += 128) {
    const u32 piece = i & 7, row = left + (i >> 3) % (128 - left), chunk = (i >> 3) / (128 - left);
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + chunk * step + row * 128 + piece * 16), "r"(0) : "memory");
  }
  fence_async_proxy();
  asm volatile("bar.sync %0, 128;" ::"r"(3 + turn) : "memory");
}

// s = q @ k.T of 64 queries and 128 keys. Order-critical: d ascending.
DEVICE void scores(float (&s)[64], u32 q, u32 k) {
  const u64 x = descriptor_of(q, 16), y = descriptor_of(k, 16);
#pragma unroll
  for (int i = 0; i < 4 * CHUNKS; ++i)
    mma_s(s, x + ((i / 4 * 8192 + i % 4 * 32) >> 4), y + ((i / 4 * CHUNK + i % 4 * 32) >> 4), i != 0);
}

// [o_n | l_n] = p @ [v | 1]. Order-critical: keys ascending.
DEVICE void values(float (&o)[NV], const u32 (&p)[32], u32 v, u32 step) {
  const u64 y = descriptor_of(v, step);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 x[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
    mma_o(o, x, y + (i * 2048 >> 4), i != 0);
  }
}

// A leaf joins: o = fma(o_n, b, o * a), where times 1 is left out.
DEVICE void fold(float (&o)[NV], float (&o_n)[NV], const Factors (&f)[2], const Walk& w, int first, bool edge) {
  if (CAUSAL && edge) {  // a leaf behind all that a row may see is no part of its walk, whatever its values are
#pragma unroll
    for (int i = 0; i < NV; ++i)
      if (first >= w.reach[row_of(i)]) o_n[i] = 0.0f;
  }
  if (__all_sync(~0u, f[0].a == 1.0f && f[1].a == 1.0f)) {
#pragma unroll
    for (int i = 0; i < NV; ++i) o[i] = __fmaf_rn(o_n[i], f[row_of(i)].b, o[i]);
  } else {
#pragma unroll
    for (int i = 0; i < NV; ++i) o[i] = __fmaf_rn(o_n[i], f[row_of(i)].b, o[i] * f[row_of(i)].a);
  }
}

DEVICE void store_rows(u8* y, i64 step, int row, int tq, int dv, const float (&o)[NV], const float (&l)[2], u32 lane) {
  const float over[2] = {__fdiv_rn(1.0f, l[0]), __fdiv_rn(1.0f, l[1])};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = row + 8 * r;
#pragma unroll
    for (int j = 0; j < 8 * CHUNKS; j += 4) {
      if (OUT == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int d = 8 * (j + i) + 2 * (lane & 3);
          float* at = (float*)y + token * step + d;
          if (token < tq && d < dv) at[0] = finish(o[4 * (j + i) + 2 * r], over[r], l[r]);
          if (token < tq && d + 1 < dv) at[1] = finish(o[4 * (j + i) + 2 * r + 1], over[r], l[r]);
        }
      } else {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = finish(o[4 * (j + i) + 2 * r], over[r], l[r]), z = finish(o[4 * (j + i) + 2 * r + 1], over[r], l[r]);
          w[i] = narrow<OUT>(x, z);
        }
        transpose_quad(w, lane);
        const int d = 8 * (j + (lane & 3));
        if (token < tq && d < dv) *(uint4*)(y + 2 * (token * step + d)) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

// A tile of queries, longest walks first; blocks take them in turns that go back and forth, so that each gets its share.
struct Tile {
  int head, item, first_row, lo, hi, leaves;
};
struct Plan {
  const int *start, *stop;
  int heads, tiles, items, tq, tk, offset;
  __device__ __forceinline__ int rounds() const { return (heads * tiles * items + gridDim.x - 1) / gridDim.x; }
  __device__ __forceinline__ bool at(int round, Tile& t) const {
    const int i = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x), each = heads * items;
    if (i >= each * tiles) return false;
    t.item = i % each / heads, t.head = i % heads, t.first_row = (tiles - 1 - i / each) * BM;
    t.lo = start ? max(start[t.item], 0) : 0, t.hi = stop ? min(stop[t.item], tk) : tk;
    const int end = CAUSAL ? min(t.hi, min(tq, t.first_row + BM) + offset) : t.hi;
    t.leaves = end > t.lo ? (end - t.lo + LEAF - 1) / LEAF : 0;
    return true;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_hopper(const __grid_constant__ Map map_q, const __grid_constant__ Map map_k, const __grid_constant__ Map map_v,
                 const u8* mask, const int* start, const int* stop, u8* y, float* stats, i64 mask_b, i64 mask_h, i64 mask_t,
                 i64 mask_k, i64 y_b, i64 y_h, i64 y_t, int tq, int tk, int dv, int group, int offset, int heads, int tiles,
                 int items, float c) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[10];
  const u32 base = (shared(memory) + 1023) & ~1023u;
  const u32 full_k = shared(barriers), full_v = full_k + 16, empty_k = full_k + 32, empty_v = full_k + 48;
  const u32 full_q = full_k + 64, empty_q = full_k + 72;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, warpgroup = warp >> 2;
  const Plan plan{start, stop, heads, tiles, items, tq, tk, offset};

  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      barrier_init(full_k + 8 * s, 1), barrier_init(full_v + 8 * s, 1);
      barrier_init(empty_k + 8 * s, 4 * WARPGROUPS), barrier_init(empty_v + 8 * s, 4 * WARPGROUPS);
    }
    barrier_init(full_q, 1), barrier_init(empty_q, 4 * WARPGROUPS);
    barrier_init_fence();
  }
  for (u32 at = threadIdx.x * 4; at < CHUNK; at += THREADS * 4)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + ONES + at), "r"(KIND == 1 ? 0x3f803f80 : 0x3c003c00) : "memory");
  fence_async_proxy();
  __syncthreads();
  wait_for_predecessor();
  const int rounds = plan.rounds();
  u32 turn = 0;  // tiles so far
  Buffers next;
  Tile t;

  if (warpgroup == WARPGROUPS) {  // the producer
    fewer_registers<FEWER>();
    if (warp == 4 * WARPGROUPS && elected()) {
      for (int round = 0; round < rounds; ++round) {
        if (!plan.at(round, t)) continue;
        barrier_wait(empty_q, (turn++ & 1) ^ 1);
        barrier_expect(full_q, WARPGROUPS * CHUNKS * 8192);
        for (int g = 0; g < WARPGROUPS; ++g)
          for (int i = 0; i < CHUNKS; ++i)
            load_box(base + Q_AT + (g * CHUNKS + i) * 8192, &map_q, full_q, 64 * i, t.first_row + 64 * g, t.head, t.item);
        for (int n = 0; n < t.leaves; ++n, next.advance()) {
          const int key = t.lo + n * LEAF;
          barrier_wait(empty_k + next.barrier, next.parity ^ 1);
          barrier_expect(full_k + next.barrier, CHUNKS * CHUNK);
          for (int i = 0; i < CHUNKS; ++i)
            load_box(base + next.k + i * CHUNK, &map_k, full_k + next.barrier, 64 * i, key, t.head / group, t.item);
          barrier_wait(empty_v + next.barrier, next.parity ^ 1);
          barrier_expect(full_v + next.barrier, CHUNKS * CHUNK);
          for (int i = 0; i < CHUNKS; ++i)
            load_box(base + next.v + i * next.step, &map_v, full_v + next.barrier, 64 * i, key, t.head / group, t.item);
        }
      }
    }
  } else {  // consumers
    more_registers<MORE>();
    const u32 q = base + Q_AT + warpgroup * CHUNKS * 8192;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      if (!plan.at(round, t)) continue;
      const int block = t.first_row + 64 * warpgroup, row = block + 16 * (warp & 3) + (lane >> 2);
      const int whole = CAUSAL ? min(t.hi, block + offset + 1) : t.hi;  // keys that all rows see
      Walk w{mask, mask_t, mask_k, t.hi, {t.hi, t.hi}, {row, row + 8}, tq, c};
      if (MASK) w.mask += (t.item * mask_b + t.head * mask_h) * (MASK == 1 ? 1 : MASK_KIND == 0 ? 4 : 2);
      if (CAUSAL) w.reach[0] = min(t.hi, row + offset + 1), w.reach[1] = min(t.hi, row + offset + 9);
      float o[NV], s[64], m[2] = {NONE, NONE}, m_n[2];
      u32 p[32];
#pragma unroll
      for (int i = 0; i < NV; ++i) o[i] = 0.0f;
      barrier_wait(full_q, turn++ & 1);
      if (t.leaves == 0 && lane == 0) barrier_arrive(empty_q);
#pragma unroll 1
      for (int n = 0; n < t.leaves; ++n, next.advance()) {
        const int first = t.lo + n * LEAF;
        barrier_wait(full_k + next.barrier, next.parity);
        wgmma_fence();
        scores(s, q, base + next.k);
        wgmma_commit();
        const bool edge = first + LEAF > whole || MASK == 2 || (MASK == 1 && !all_seen(w, first, lane));
        barrier_wait(full_v + next.barrier, next.parity);
        wgmma_wait<0>();
        pin(s);
        if (lane == 0) {
          barrier_arrive(empty_k + next.barrier);
          if (n + 1 == t.leaves) barrier_arrive(empty_q);
        }
        if (edge) softmax<true>(s, p, m_n, w, first, lane);
        else softmax<false>(s, p, m_n, w, first, lane);
        if (stop && first + LEAF > t.hi) clear_behind(base + next.v, next.step, t.hi - first, threadIdx.x & 127, warpgroup);
        float o_n[NV];
        wgmma_fence();
        values(o_n, p, base + next.v, next.step);
        wgmma_commit();
        const Factors f[2] = {join(m[0], m_n[0]), join(m[1], m_n[1])};
        wgmma_wait<0>();
        pin(o_n);
        if (lane == 0) barrier_arrive(empty_v + next.barrier);
        fold(o, o_n, f, w, first, edge);
      }
      const float l[2] = {o[NV - 4], o[NV - 2]};
      store_rows(y + (OUT ? 2 : 4) * (t.item * y_b + t.head * y_h), y_t, row, tq, dv, o, l, lane);
      if ((lane & 3) == 0 && stats) {
        const i64 line = ((i64)t.item * heads + t.head) * tq + row, all = (i64)items * heads * tq;
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (row + 8 * r < tq) stats[line + 8 * r] = m[r] + 0.0f, stats[all + line + 8 * r] = canonical(l[r]);
      }
    }
  }
  release_successor();
}
