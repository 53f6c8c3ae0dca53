// Products of groups of rows that stand one after the other, how many in each the device alone knows.
//
// Operands   hopper.cu's, whose device code this is but for who walks what. OUTER 0: D[r, c] = sum over k of X[g][r, k] * Y[c, k]
//            for the rows c of group g; X are weights, a matrix for each group. OUTER 1: D[g][r, c] = sum over the rows k of
//            group g of X[r, k] * Y[c, k], both MN-major.
// Order      hopper.cu's; blocks of 16 are counted from a group's first row. With LEAVES, sums of `leaf` stages are added
//            to a total in ascending order: it lies in local memory, as few groups have two.
// Groups     A warp adds up the lengths of `groups` groups (kind 0: counts of 32 bits, 1: of 64 bits, 2: ends of 32 bits) into
//            two tables in shared memory: where each begins among `rows` rows, and among the tiles. Tiles of a group are
//            neighbours, those along its rows first, so that weights come from memory once. A length below 0 is 0, and
//            what goes beyond `rows` is cut. OUTER 0: rows behind the last group are one of their own, of zeros.
// Edges      A tile of rows reads what stands behind its group, which no other row sees, and does not store it. Rows of K
//            behind a group become zeros in shared memory, in both operands: a warp beside the producer sees to that.

#include "gemm/hopper/hopper.cu"

struct Piece {
  int group, row, col, begin, end, iters;
  // Rows of K in the last stage, 0 where it is full.
  __device__ __forceinline__ int rest() const { return OUTER ? (end - begin) % (KS * KE) : 0; }
};

DEVICE int length(const void* counts, int kind, int i) {
  if (kind == 1) {
    const i64 n = ((const i64*)counts)[i];
    return n < 0 ? 0 : n < 0x3fffffff ? (int)n : 0x3fffffff;
  }
  const i64 n = ((const int*)counts)[i], before = kind == 2 && i > 0 ? ((const int*)counts)[i - 1] : 0;
  return n > before ? (int)min(n - before, (i64)0x3fffffff) : 0;
}

DEVICE int upto(int n, int most, u32 lane) {  // sums over the lanes before and this one, `most` at most
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, n, d);
    if (lane >= d) n = min(n + other, most);
  }
  return n;
}

struct Walk {
  int *begin, *first;  // tables of groups + 2
  int groups, rows, iters, tiles_x, tiles_y, group;

  __device__ __forceinline__ int tall(int n) const { return OUTER ? tiles_y : (n + BN - 1) / BN; }
  __device__ __forceinline__ void lay_out(const void* counts, int kind, u32 lane) {
    int row = 0, tile = 0;
    for (int g = 0; g <= groups; g += 32) {
      const int i = g + lane;
      const int n = i < groups ? min(length(counts, kind, i), rows) : 0;
      const int sum = upto(n, rows, lane), before = __shfl_up_sync(~0u, sum, 1);
      const int start = min(row + (lane ? before : 0), rows), end = i < groups ? min(row + sum, rows) : rows;
      const bool any = i < groups ? !OUTER || !ACCUMULATE || end > start : !OUTER && i == groups;
      const int tiles = any ? tiles_x * tall(end - start) : 0, through = upto(tiles, 0x3fffffff, lane);
      if (i <= groups) begin[i] = start, first[i + 1] = tile + through;
      row = min(row + __shfl_sync(~0u, sum, 31), rows), tile += __shfl_sync(~0u, through, 31);
    }
    if (lane == 0) first[0] = 0, begin[groups + 1] = rows;
  }
  __device__ __forceinline__ int count() const { return first[groups + 1]; }
  __device__ __forceinline__ Piece at(int t) {  // of ascending t
    while (t >= first[group + 1]) ++group;
    const int start = begin[group], end = begin[group + 1], high = tall(end - start);
    const int r = t - first[group], x = r / high, y = r - x * high;
    const int walked = OUTER ? (end - start + KS * KE - 1) / (KS * KE) : group < groups ? iters : 0;
    return {group, x * BM, y * BN + (OUTER ? 0 : start), start, end, walked};
  }
};

// The first sixteens of a stage's rows of K, where a group has no more: one box of 16 rows for each of a chunk's.
template <int CHUNKS> DEVICE void load_sixteens(const Map* map, u32 to, u32 bar, int row, int k, int sixteens, u64 policy) {
  for (int j = 0; j < CHUNKS; ++j)
    for (int i = 0; i < sixteens; ++i) tma_load(to + j * 8192 + i * 2048, map, bar, row + 64 * j, k + 16 * i, 0, policy);
}

// A warp sets rows of K from `valid` on to zero in a stage, which holds 64 of them in each chunk of 8192 bytes.
DEVICE void zero_behind(u32 at, int valid, u32 lane) {
#pragma unroll 1
  for (u32 chunk = at; chunk < at + STAGE_BYTES; chunk += 8192)
#pragma unroll 4
    for (u32 byte = 128 * valid + 16 * lane; byte < 8192; byte += 512)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(chunk + byte), "r"(0) : "memory");
  fence_async_proxy();
}

#if ACCUMULATE && !LEAVES
#define START(i) totals[i]
#else
#define START(i) 0.0f
#endif
static __device__ const u32 NOTHING = 0;  // the bias of rows that belong to no group

extern "C" __global__ void __launch_bounds__(THREADS, OCCUPANCY)
grouped(const __grid_constant__ Map map_x, const __grid_constant__ Map map_y, const __grid_constant__ Map sixteens_x,
        const __grid_constant__ Map sixteens_y, const void* counts, u8* out, const u8* bias, i64 out_ld, i64 out_batch, i64 bias_step, i64 bias_batch, int high, int wide, int rows, int groups, int iters,
        int leaf, int tiles_x, int tiles_y, int kind) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[(OUTER ? 3 : 2) * STAGES];
  const u32 ring = (shared(memory) + 1023) & ~1023u, full = shared(barriers), empty = full + 8 * STAGES;
  const u32 landed = empty + 8 * STAGES;  // stages whose last rows are not the group's: `full` once they are zeros
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, warpgroup = warp >> 2;
  u8* const pieces = memory + (ring - shared(memory)) + STAGES * STAGE_BYTES;
  int* const tables = (int*)(pieces + TURNED);
  Walk walk{tables, tables + groups + 2, groups, rows, iters, tiles_x, tiles_y, 0};

  if (threadIdx.x == 0) {
    map_prefetch(&map_x), map_prefetch(&map_y);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      if (OUTER) barrier_init(landed + 8 * s, 1);
      barrier_init(empty + 8 * s, PINGPONG ? 1 : WARPGROUPS);
    }
    barrier_init_fence();
  }
  wait_for_predecessor();
  if (warp == 0) walk.lay_out(counts, kind, lane);
  __syncthreads();
  const int tiles = walk.count();

  if (warpgroup == WARPGROUPS) {  // the producer
    if (WARPGROUPS > 1) fewer_registers<PRODUCER_REGISTERS>();
    if (warp == 4 * WARPGROUPS && elected()) {
      u32 stage = 0, parity = 1;
      for (int t = cluster_id(); t < tiles; t += cluster_count()) {
        const Piece p = walk.at(t);
        for (int i = 0; i < p.iters; ++i) {
          const int rest = i == p.iters - 1 ? p.rest() : 0, k = (OUTER ? p.begin : 0) + i * KS * KE;
          const int sixteens = rest ? (rest + 15) / 16 : 4;
          const u32 bar = (rest ? landed : full) + 8 * stage, at = ring + stage * STAGE_BYTES;
          barrier_wait(empty + 8 * stage, parity);
          barrier_expect(bar, STAGE_BYTES / 4 * sixteens);
          if (OUTER && sixteens < 4) {
            load_sixteens<X_BYTES / 8192>(&sixteens_x, at, bar, p.row, k, sixteens, POLICY[X_POLICY]);
            load_sixteens<Y_BYTES / 8192>(&sixteens_y, at + X_BYTES, bar, p.col, k, sixteens, POLICY[Y_POLICY]);
          } else {
            load_operand<X_MN, X_ROWS, 1>(&map_x, at, bar, p.row, k, OUTER ? 0 : p.group, 0, 0, POLICY[X_POLICY]);
            load_operand<Y_MN, BN, 1>(&map_y, at + KS * X_BYTES, bar, p.col, k, 0, 0, 0, POLICY[Y_POLICY]);
          }
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
      release_successor();
    } else if (OUTER && warp == 4 * WARPGROUPS + 1) {  // here, where no store of a result is waited for by the fence
      u32 walked = 0, parities = 0;
      for (int t = cluster_id(); t < tiles; t += cluster_count()) {
        const Piece p = walk.at(t);
        walked += p.iters;
        if (p.rest() == 0) continue;
        const u32 stage = (walked - 1) % STAGES;
        barrier_wait(landed + 8 * stage, parities >> stage & 1);
        parities ^= 1u << stage;
        zero_behind(ring + stage * STAGE_BYTES, p.rest(), lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8 * stage);
      }
    }
  } else {  // consumers
    if (WARPGROUPS > 1) more_registers<CONSUMER_REGISTERS>();
    if (PINGPONG && warpgroup == 1) turn_give(1);  // the first turn is warpgroup 0's
    const int block = PINGPONG ? 0 : warpgroup * MW;
    const u64 first_x = descriptor<X_MN>(ring + block * 8192), first_y = descriptor<Y_MN>(ring + KS * X_BYTES);
    const u32 to = told();
    u32 walked = 0, turn = 0;
#if LEAVES || ACCUMULATE
    float kept[MW * NACC], *totals = kept;  // in memory: few groups have two leaves
    asm volatile("" : "+l"(totals)::"memory");
#endif
    for (int t = cluster_id(); t < tiles; t += cluster_count()) {
      const Piece p = walk.at(t);
      if (PINGPONG && (turn++ & 1) != warpgroup) {
        walked += p.iters;
        continue;
      }
      float acc[MW][NACC];
      const int row = p.row + 64 * block, item = OUTER ? p.group : 0;
      const bool none = !OUTER && p.group == groups;
      const u8* const addend = none ? (const u8*)&NOTHING : bias + p.group * bias_batch;
      Epilogue e{out, out, addend, out_ld, out_batch, COLUMNS ? 1 : out_ld, COLUMNS ? out_ld : 1, out_batch,
                 none ? 0 : bias_step, high, OUTER ? wide : p.end, 1.0f, 0.0f};
      e.pieces = pieces;
#if ACCUMULATE
      const int thread_row = row + 16 * (warp & 3) + (lane >> 2), thread_col = p.col + 2 * (lane & 3);
#pragma unroll 8
      for (int i = 0; i < MW * NACC; i += 2) {
        const float2 start = load_c(e, i % NACC, thread_row + i / NACC * 64, thread_col, item);
        totals[i] = start.x, totals[i + 1] = start.y;
      }
#endif
#pragma unroll
      for (int i = 0; i < MW * NACC; ++i) acc[i / NACC][i % NACC] = START(i);
      // Tied down as floats, here and below: stores trade them as integers, and a compiler that carries integers around the
      // loop copies registers that instructions in flight still write (sums of a last stage were lost).
#pragma unroll
      for (int m = 0; m < MW; ++m) pin(acc[m]);
      int scale = ACCUMULATE && !LEAVES;
      if (PINGPONG) turn_take(1 + warpgroup);  // see hopper.cu
      u32 stage = walked % STAGES, parity = walked / STAGES & 1, previous = 0, ahead = stage * (STAGE_BYTES >> 4);
      bool filled = false;
      const int span = LEAVES ? leaf : p.iters;
#pragma unroll 1
      for (int begin = 0; begin < p.iters; begin += span) {
        const int n = min(span, p.iters - begin);
        wgmma_fence();
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
          if (!filled) barrier_wait(full + 8 * stage, parity);
          multiply(acc, further(first_x, ahead), further(first_y, ahead), scale, [&] {
            const u32 here = stage;
            ahead += STAGE_BYTES >> 4;
            if (++stage == STAGES) stage = 0, ahead = 0, parity ^= 1;
            filled = barrier_passed(full + 8 * stage, parity);
            wgmma_commit();
            wgmma_wait<1>();
            release(empty + 8 * previous, i ? to : NOBODY);
            previous = here;
          });
          if (ASIDE < LAST) wgmma_commit();
        }
        if (PINGPONG && begin + span >= p.iters) turn_give(2 - warpgroup);
        wgmma_wait<0>();
        release(empty + 8 * previous, to);
#pragma unroll
        for (int m = 0; m < MW; ++m) pin(acc[m]);
#if LEAVES
#pragma unroll
        for (int i = 0; i < MW * NACC; ++i) {  // ascending leaves, one rounding each
          float& x = acc[i / NACC][i % NACC];
          x = __fadd_rn(ACCUMULATE || begin > 0 ? totals[i] : 0.0f, x);
          if (begin + span < p.iters) totals[i] = x;
        }
        scale = 0;
#endif
      }
      if (PINGPONG && p.iters == 0) turn_give(2 - warpgroup);
      walked += p.iters;
#pragma unroll
      for (int m = 0; m < MW; ++m) pin(acc[m]);
#pragma unroll
      for (int m = 0; m < MW; ++m) store_block(e, acc[m], row + 64 * m, p.col, item, threadIdx.x);
    }
  }
}
