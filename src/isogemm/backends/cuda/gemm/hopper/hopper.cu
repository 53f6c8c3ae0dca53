// D[r, c] = sum over k of X[r, k] * Y[c, k]: a persistent, warp-specialised chain on wgmma, fed by the tensor copy engine.
//
// Operands   X and Y of bf16 or fp16, three-dimensional maps (row, k, item), K-major or, with X_MN and Y_MN, MN-major. Of a
//            K-major operand whose copies bring whole stages (k in chunk, row, chunk of 64 of K).
//            Which of A and B is X is the caller's affair; D lies with its columns contiguous, or its rows (COLUMNS 1), so
//            weights or tokens can be the 64 rows of an instruction.
// Order      every element walks K in ascending blocks of 16, one instruction each, in one float32 accumulator; with
//            LEAF it starts again from zero every `leaf` stages, and leaf sums are added in ascending order to a total that
//            begins with FIRST: +0, or -0, which leaves the first sum as it is (two leaves of a tree). QUADS: a tree of as
//            many times four leaves; four meet in registers, quads level by level, as a binary counter carries.
// Roles      WARPGROUPS consumers, each with MW blocks of 64 rows and BN columns; one thread of the last warp(group) fills
//            a ring of STAGES buffers of KS * 128 bytes of K. PINGPONG: the two consumers own alternate tiles, so that
//            one's epilogue hides behind the other's products; else they share a tile of BM rows.
// Short      a tile of 16 or 32 rows is one block of 64 whose other rows are nobody's: neither loaded nor stored.
// Edges      lines outside of an operand take longer than those inside of it. What would reach beyond the end is walked further
//            back, over lines that others have too, and stores what is its own.
// Copies     of one chunk of 64 of K or, where X_WHOLE or Y_WHOLE, of all that a block loads of a stage.
// Clusters   CM x CN blocks take neighbouring tiles. Blocks in a row of it share X and each loads 1 / CN of it for all of them;
//            blocks in a column share Y. A buffer is free once the consumers of every block that shares either have left it.
// Successor  blocks of the next launch may come when the last stage has been asked for or, `late`, when it has been used.

#include "include/hopper_operand.cu"
#include "include/hopper_epilogue.cu"

constexpr int THREADS = WARPGROUPS == 1 ? 160 : 128 * (WARPGROUPS + 1);
constexpr int BM = TILE_ROWS;
constexpr int X_LINE = X_MN && BM < 64 ? BM : 64;
constexpr int X_BYTES = X_ROWS * 128;           // X_ROWS < BM: the rest of an instruction's rows reads whatever follows
constexpr int Y_BYTES = (Y_MN ? (BN + 63) / 64 * 64 : BN) * 128;
constexpr int STAGE_BYTES = KS * (X_BYTES + Y_BYTES);
constexpr int CLUSTER = CM * CN;
constexpr int NACC = BN / 2;
constexpr bool EARLY = MW * NACC <= 96 && !LEAF;
constexpr int LAST = 4 * KS - 1, ASIDE = WARPGROUPS == 1 ? LAST / 2 : LAST;  // instructions of a stage: see `multiply`
constexpr u64 POLICY[3] = {0, 0x12F0000000000000, 0x14F0000000000000};                 // none, evict first, evict last

struct Grid {
  int tiles_x, tiles_y, items, group;
  __device__ __forceinline__ int count() const { return tiles_x * tiles_y * items; }
  // Groups of `group` tiles along X, Y slowest inside a group, so that concurrent tiles share operands in L2.
  __device__ __forceinline__ Tile operator[](int t) const {
    const int each = tiles_x * tiles_y, item = t / each, r = t - item * each;
    const int width = group * tiles_y, first = r / width * group, high = min(tiles_x - first, group), in = r - first * tiles_y;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    return {((first + in % high) * CM + (int)rank % CM) * BM, (in / high * CN + (int)rank / CM) * BN, item};
  }
};

// Where a tile is walked: not beyond the last place from which it reaches the end, in steps that keep lines and stores whole.
// Where a tile's own place would cost a walk registers that it has not, it is walked there.
constexpr bool BACK = MW * NACC < 192;
constexpr int X_STEP = X_MN ? X_LINE : 8, Y_STEP = Y_MN && BN % 64 == 0 ? 64 : 8;
DEVICE Tile walked(Tile t, int rows, int cols) {
  if (!BACK) return t;
  const int far_x = (rows - BM + X_STEP - 1) & -X_STEP, far_y = (cols - BN + Y_STEP - 1) & -Y_STEP;
  const int dx = (far_x & ~(far_x >> 31)) - t.row, dy = (far_y & ~(far_y >> 31)) - t.col;  // `min` has no uniform registers
  return {t.row + (dx & dx >> 31), t.col + (dy & dy >> 31), t.item};
}

// All products of a stage, in ascending order of K, and what else there is to do. A warpgroup that is alone issues an
// instruction when the one before is nearly done: what lies between two of them is free, what lies between stages is not.
template <class F> DEVICE void multiply(float (&acc)[MW][NACC], u64 dx, u64 dy, int& scale, F aside) {
#pragma unroll
  for (int k = 0; k < 4 * KS; ++k) {
#pragma unroll
    for (int m = 0; m < MW; ++m)
      mma(acc[m], further(dx, (k / 4 * X_BYTES + m * 8192 + k % 4 * (X_MN ? 32 * X_LINE : 32)) >> 4),
          further(dy, (k / 4 * Y_BYTES + k % 4 * (Y_MN ? 2048 : 32)) >> 4), scale);
    scale = 1;
    if (k == ASIDE) aside();
  }
}

// Sums of neighbours meet; order-critical: what came before is the left operand.
DEVICE void meet(float (&left)[MW][NACC], float (&right)[MW][NACC]) {
#pragma unroll
  for (int m = 0; m < MW; ++m) {
    pin(left[m]), pin(right[m]);
#pragma unroll
    for (int i = 0; i < NACC; ++i) left[m][i] = __fadd_rn(left[m][i], right[m][i]);
    pin(left[m]);  // here, not later: `right` is needed again
  }
}

#if LEVELS
// What is complete meets what waits for it, or waits: INSIDE levels in shared memory, others in memory, 16 bytes a
// thread at a time. Order-critical as `meet`.
DEVICE void carry(float (&sum)[MW][NACC], int quad, float4* near, float4* far) {
  constexpr int LANES = 128 * WARPGROUPS, EACH = MW * NACC / 4;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    float4* at = level < INSIDE ? near + level * EACH * LANES : far + (level - INSIDE) * EACH * LANES;
    const bool waits = quad >> level & 1;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float* v = &sum[4 * i / NACC][4 * i % NACC];
      if (waits) {
        const float4 w = at[i * LANES];
        v[0] = __fadd_rn(w.x, v[0]), v[1] = __fadd_rn(w.y, v[1]), v[2] = __fadd_rn(w.z, v[2]), v[3] = __fadd_rn(w.w, v[3]);
      } else {
        at[i * LANES] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
    if (!waits) return;
  }
}
#endif

// The block of the cluster that this thread tells which buffers its warpgroup has left. Every block that writes into ours is told
// by one thread, in the warps by turns.
constexpr u32 NOBODY = ~0u;
DEVICE u32 told() {
  const u32 to = threadIdx.x % 32 * 4 + threadIdx.x / 32 % 4, rank = CLUSTER > 1 ? cluster_rank() : 0;
  return to < CLUSTER && (to % CM == rank % CM || to / CM == rank / CM) ? to : NOBODY;
}
// Tell that block of a buffer. An instruction is all four warps', so what one of them has waited for is complete for all.
DEVICE void release(u32 empty, u32 to) {
  if (to == NOBODY) return;
  if (CLUSTER == 1) barrier_arrive(empty);
  else barrier_arrive_at(empty, to);
}

#if LEAF
// Totals of leaves: TOTALS of them in registers, the rest in shared memory, 16 bytes a thread at a time.
struct Totals {
  float kept[TOTALS > 0 ? TOTALS : 1];
  u32 rest;
  __device__ __forceinline__ u32 at(int i) const { return rest + (i - TOTALS) / 4 * (2048 * WARPGROUPS); }
  __device__ __forceinline__ void start(const Epilogue& e, int row, int col, int item) {
#pragma unroll
    for (int i = 0; i < MW * NACC; i += 2)
      if (i < TOTALS) first(e, i, row, col, item, kept[i], kept[i + 1]);
#pragma unroll
    for (int i = TOTALS; i < MW * NACC; i += 16) {  // 16 loads in flight
      float t[16];
#pragma unroll
      for (int j = 0; j < 16; j += 2)
        if (i + j < MW * NACC) first(e, i + j, row, col, item, t[j], t[j + 1]);
#pragma unroll
      for (int j = 0; j < 16; j += 4)
        if (i + j < MW * NACC) write(at(i + j), t[j], t[j + 1], t[j + 2], t[j + 3]);
    }
  }
  __device__ __forceinline__ void add(const float (&v)[MW][NACC]) {
#pragma unroll
    for (int i = 0; i < MW * NACC; ++i)
      if (i < TOTALS) kept[i] = __fadd_rn(kept[i], v[i / NACC][i % NACC]);
#pragma unroll
    for (int i = TOTALS; i < MW * NACC; i += 4) {
      float t[4];
      read(at(i), t);
#pragma unroll
      for (int j = 0; j < 4; ++j) t[j] = __fadd_rn(t[j], v[(i + j) / NACC][(i + j) % NACC]);
      write(at(i), t[0], t[1], t[2], t[3]);
    }
  }
  __device__ __forceinline__ void finish(float (&v)[MW][NACC]) const {
#pragma unroll
    for (int i = 0; i < MW * NACC; ++i)
      if (i < TOTALS) v[i / NACC][i % NACC] = kept[i];
#pragma unroll
    for (int i = TOTALS; i < MW * NACC; i += 4) {
      float t[4];
      read(at(i), t);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[(i + j) / NACC][(i + j) % NACC] = t[j];
    }
  }
  static __device__ __forceinline__ void first(const Epilogue& e, int i, int row, int col, int item, float& x, float& y) {
    const float2 c = ACCUMULATE ? load_c(e, i % NACC, row + i / NACC * 64, col, item) : make_float2(FIRST, FIRST);
    x = c.x, y = c.y;
  }
  static __device__ __forceinline__ void read(u32 a, float (&t)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(t[0]), "=f"(t[1]), "=f"(t[2]), "=f"(t[3]) : "r"(a) : "memory");
  }
  static __device__ __forceinline__ void write(u32 a, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
  }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, OCCUPANCY)
hopper(const __grid_constant__ Map map_x, const __grid_constant__ Map map_y, u8* out, const void* c, const void* bias,
#if LEVELS > INSIDE
       float4* waiting,
#endif
       i64 out_ld, i64 out_batch, i64 c_row, i64 c_col, i64 c_batch, i64 bias_step, int rows, int cols, int iters,
       int leaf, int tiles_x, int tiles_y, int items, int group, int x_item, int y_item, int late, float alpha, float beta) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const u32 ring = (shared(memory) + 1023) & ~1023u, full = shared(barriers), empty = full + 8 * STAGES;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp >> 2;
  const Grid grid{tiles_x, tiles_y, items, group};
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, (PINGPONG ? 1 : WARPGROUPS) * (CM + CN - 1));
    }
    barrier_init_fence();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  if (warpgroup == WARPGROUPS) {  // the producer
    if (WARPGROUPS > 1) fewer_registers<PRODUCER_REGISTERS>();
    if (warp == 4 * WARPGROUPS && elected()) {
      map_prefetch(&map_x), map_prefetch(&map_y);
      wait_for_predecessor();
      u16 mask_x = 0, mask_y = 0;
      for (int i = 0; i < CN; ++i) mask_x |= 1 << (rank % CM + CM * i);
      for (int i = 0; i < CM; ++i) mask_y |= 1 << (rank / CM * CM + i);
      u32 stage = 0, parity = 1;
      for (int t = cluster_id(); t < grid.count(); t += cluster_count()) {
        const Tile tile = walked(grid[t], rows, cols);
        for (int i = 0; i < iters; ++i) {
          const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
          barrier_wait(empty + 8 * stage, parity);
          barrier_expect(bar, STAGE_BYTES);
          load_operand<X_MN, X_ROWS, CN, X_WHOLE, X_LINE>(&map_x, at, bar, tile.row, i * KS * KE, tile.item * x_item, rank / CM, mask_x, POLICY[X_POLICY]);
          load_operand<Y_MN, BN, CM, Y_WHOLE>(&map_y, at + KS * X_BYTES, bar, tile.col, i * KS * KE, tile.item * y_item, rank % CM, mask_y, POLICY[Y_POLICY]);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
      if (late) barrier_wait(empty + 8 * (stage ? stage - 1 : STAGES - 1), stage ? parity ^ 1 : parity);
      release_successor();
      if (CLUSTER > 1) drain(empty, STAGES, stage, parity);
    }
  } else {  // consumers
    if (WARPGROUPS > 1) more_registers<CONSUMER_REGISTERS>();
    wait_for_predecessor();
    if (PINGPONG && warpgroup == 1) turn_give(1);  // the first turn is warpgroup 0's
    Epilogue e{out, c, bias, out_ld, out_batch, c_row, c_col, c_batch, bias_step, rows, cols, alpha, beta};
    e.pieces = memory + (ring - shared(memory)) + STAGES * STAGE_BYTES;
    const int block = PINGPONG ? 0 : warpgroup * MW, span = LEAF ? leaf : iters;
    const int step = cluster_count() * (PINGPONG ? 2 : 1);
    const u32 to = told();
    const u64 first_x = descriptor<X_MN, X_LINE>(ring + block * 8192), first_y = descriptor<Y_MN>(ring + KS * X_BYTES);
    u32 count = PINGPONG ? warpgroup * iters : 0;
    float acc[MW][NACC];
#if QUADS
    float second[MW][NACC], third[MW][NACC];
    float4* const near = (float4*)(e.pieces + TURNED) + threadIdx.x;
#if LEVELS > INSIDE
    waiting += blockIdx.x * ((LEVELS - INSIDE) * (MW * NACC / 4) * 128 * WARPGROUPS) + threadIdx.x;
#else
    float4* const waiting = nullptr;
#endif
#elif LEAF
    Totals total;
    total.rest = ring + STAGES * STAGE_BYTES + TURNED + 16 * threadIdx.x;
#endif
    for (int t = cluster_id() + (PINGPONG ? warpgroup * cluster_count() : 0); t < grid.count(); t += step) {
      const Tile own = grid[t], tile = walked(own, rows, cols);
      if (BACK) e.first_row = own.row, e.first_col = own.col;
      const int row = tile.row + 64 * block;
      if (BM < 64) e.rows = min(rows, tile.row + BM);
      Bias held[MW];  // where the walk leaves registers, the bias comes while it goes on
      if constexpr (EARLY) {
#pragma unroll
        for (int m = 0; m < MW; ++m) held[m] = bias_of(e, row + 64 * m, tile.col, threadIdx.x);
      }
#if LEAF || ACCUMULATE
      const u32 lane = threadIdx.x & 31;
      const int thread_row = row + 16 * (warp & 3) + (lane >> 2), thread_col = tile.col + 2 * (lane & 3);
#endif
#if LEAF
      total.start(e, thread_row, thread_col, tile.item);
#elif ACCUMULATE
#pragma unroll
      for (int i = 0; i < MW * NACC; i += 2) {
        const float2 start = load_c(e, i % NACC, thread_row + i / NACC * 64, thread_col, tile.item);
        acc[i / NACC][i % NACC] = start.x, acc[i / NACC][i % NACC + 1] = start.y;
      }
#pragma unroll
      for (int m = 0; m < MW; ++m) pin(acc[m]);
#endif
      int scale = ACCUMULATE && !LEAF;
      // In turns, so that no wait is for more than the next phase: parities cannot tell phases two apart.
      if (PINGPONG) turn_take(1 + warpgroup);
      u32 stage = count % STAGES, parity = count / STAGES & 1, previous = 0, ahead = stage * (STAGE_BYTES >> 4);
      bool filled = false;
      // A stage into one set of accumulators. What the one before it left is complete once half of it, or all, is issued.
      const auto take = [&](float (&sum)[MW][NACC], bool held) {
        if (!filled) barrier_wait(full + 8 * stage, parity);
        multiply(sum, further(first_x, ahead), further(first_y, ahead), scale, [&] {
          const u32 here = stage;
          ahead += STAGE_BYTES >> 4;
          if (++stage == STAGES) stage = 0, ahead = 0, parity ^= 1;
          filled = barrier_passed(full + 8 * stage, parity);
          wgmma_commit();
          wgmma_wait<1>();
          release(empty + 8 * previous, held ? to : NOBODY);
          previous = here;
        });
        if (ASIDE < LAST) wgmma_commit();
      };
      const auto finish = [&](bool last) {
        if (PINGPONG && last) turn_give(2 - warpgroup);
        wgmma_wait<0>();
        release(empty + 8 * previous, to);
      };
#if QUADS
      // Of four leaves each is issued while the one before is under way, and two meet behind the third one's products.
      const auto walk = [&](float (&sum)[MW][NACC], int of_quad) {
        wgmma_fence();
        scale = 0;
        take(sum, of_quad);
        if (of_quad == 2) meet(acc, second);
#pragma unroll 1
        for (int i = 1; i < leaf; ++i) take(sum, true);
      };
#pragma unroll 1
      for (int quad = 0; quad < QUADS; ++quad) {
        walk(acc, 0), walk(second, 1), walk(third, 2), walk(second, 3);
        finish(quad + 1 == QUADS);
        meet(third, second);
        meet(acc, third);
#if LEVELS
        carry(acc, quad, near, waiting);
#endif
      }
#else
#pragma unroll 1
      for (int begin = 0; begin < iters; begin += span) {
        const int n = min(span, iters - begin);
        wgmma_fence();
#pragma unroll 1
        for (int i = 0; i < n; ++i) take(acc, i);
        finish(begin + span >= iters);
#pragma unroll
        for (int m = 0; m < MW; ++m) pin(acc[m]);
#if LEAF
        total.add(acc);
        scale = 0;
#endif
      }
#endif
      count += (PINGPONG ? 2 : 1) * iters;
#if LEAF
      float sum[MW][NACC];
      total.finish(sum);
#pragma unroll
      for (int m = 0; m < MW; ++m) store_block(e, sum[m], row + 64 * m, tile.col, tile.item, threadIdx.x);
#else
#pragma unroll
      for (int m = 0; m < MW; ++m) {
        if constexpr (!EARLY) held[m] = bias_of(e, row + 64 * m, tile.col, threadIdx.x);
        store_block(e, acc[m], held[m], row + 64 * m, tile.col, tile.item, threadIdx.x);
      }
#endif
    }
  }
}
