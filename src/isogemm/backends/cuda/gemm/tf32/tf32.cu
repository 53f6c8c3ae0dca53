// out = epilogue(A @ B) on tensor cores from float32 operands that gemm/tf32/split.cu has written as tf32: tf32:sm90 and tf32x3:sm90.
//
// PASSES 1   acc is one chain of fused sums over 8 of K, as in tf32:sm90.
// PASSES 3   for each 32 of K, small is the chain from +0 over lo_a * hi_b, then over hi_a * lo_b; large the chain from +0
//            over hi_a * hi_b; acc = acc + (large + (small if it is finite else 0)), both to nearest.
// LEAF       every `leaf` blocks of 32 start a chain from +0, which then joins a total, in ascending order.
//
// Operands are K-major maps (k, row, part * items + item) with zeros beyond K, which are exact. Two consumer warpgroups
// compute 64 x BN each; a thread of a third one fills a ring of STAGES buffers, each 32 of K of every part. Persistent:
// a block takes tiles blockIdx, blockIdx + gridDim, ...
// CLUSTER    2: two blocks with neighbouring rows share B, of which each loads one half for both.
// TURNS      one warpgroup issues its products when the small ones of the other are done: so their additions, which take
//            issue slots, do not meet, and the tensor cores always have work.
// Registers decide BN: a consumer holds 1, 3 or, with leaves, one more times BN / 2 accumulators.

// With `chunks` > 1 an item is one leaf of a tree: `blocks` of K beginning at chunk * blocks, written as it is; meet.cu joins them.
// The host writes `mma` before this text: one wgmma of 64 x BN x 8 on BN / 2 accumulators, scale 0 from zero.

#include "include/hopper_ptx.cu"
#include "include/fp32_epilogue.cu"

constexpr int PARTS = PASSES == 3 ? 2 : 1, NACC = BN / 2, BM = 128, ROW = 128;  // bytes of a row of 32 values
constexpr int A_BYTES = BM * ROW, B_BYTES = BN * ROW, STAGE_BYTES = PARTS * (A_BYTES + B_BYTES);

// Eight tiles of m share columns of B in L2.
struct Tiles {
  int m, n;
  __device__ __forceinline__ void find(int t, int& row, int& col, int& item) const {
    const int each = m * n, r = (item = t / each, t - item * each);
    const int first = r / (8 * n) * 8, high = min(m - first, 8), in = r - first * n;
    row = ((first + in % high) * CLUSTER + (CLUSTER > 1 ? cluster_rank() : 0)) * BM, col = in / high * BN;
  }
};

DEVICE void produce(const Map* map_a, const Map* map_b, u32 ring, u32 full, u32 empty, Tiles tiles, int count, int blocks,
                    int chunks, int items_a, int items_b) {
  const int half = CLUSTER > 1 ? (int)cluster_rank() * (BN / 2) : 0;
  u32 stage = 0, parity = 1;
  for (int t = blockIdx.x / CLUSTER; t < count; t += gridDim.x / CLUSTER) {
    int row, col, item;
    tiles.find(t, row, col, item);
    const int k0 = item % chunks * blocks, z = item / chunks;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const u32 bar = full + 8 * stage, to = ring + stage * STAGE_BYTES;
      barrier_wait(empty + 8 * stage, parity);
      barrier_expect(bar, STAGE_BYTES);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        tma_load(to + part * A_BYTES, map_a, bar, 32 * (k0 + i), row, part * items_a + (items_a > 1 ? z : 0), 0);
        const u32 to_b = to + PARTS * A_BYTES + part * B_BYTES + half * ROW;
        const int z_b = part * items_b + (items_b > 1 ? z : 0);
        if (CLUSTER > 1) tma_multicast(to_b, map_b, bar, 32 * (k0 + i), col + half, z_b, 3, 0);
        else tma_load(to_b, map_b, bar, 32 * (k0 + i), col, z_b, 0);
      }
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  release_successor();
  if (CLUSTER > 1) drain(empty, STAGES, stage, parity);
}

// A buffer is free once the consumers of every block that its producer writes to have left it.
DEVICE void release(u32 empty, u32 lane) {
  if (CLUSTER > 1) {
    if (lane < CLUSTER) barrier_arrive_at(empty, lane);
  } else if (lane == 0) {
    barrier_arrive(empty);
  }
}

DEVICE void product(float (&acc)[NACC], u64 a, u64 b, int scale) {  // 32 of K
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) mma(acc, a + 2 * kk, b + 2 * kk, kk ? 1 : scale);
}

DEVICE void consume(Epilogue e, i64 out_batch, i64 c_batch, u32 ring, u32 full, u32 empty, Tiles tiles, int count, int blocks,
                    int leaf, int m, int n, u32 warp, u32 lane) {
  const u32 warpgroup = warp >> 2;
  wait_for_predecessor();
  float acc[NACC], total[LEAF ? NACC : 1];
#if PASSES == 3
  float small[NACC], large[NACC];
#pragma unroll
  for (int i = 0; i < NACC; ++i) small[i] = large[i] = 0.0f;
#endif
  if (PASSES == 3 && TURNS && warpgroup == 1) turn_give(1);  // named barriers 1 and 2, one for the turn of each consumer
  u32 stage = 0, parity = 0;
  for (int t = blockIdx.x / CLUSTER; t < count; t += gridDim.x / CLUSTER) {
    int row, col, item;
    tiles.find(t, row, col, item);
    row += 16 * warp + (lane >> 2), col += 2 * (lane & 3);
    e.out_at = item * out_batch, e.c_at = item * c_batch;
#pragma unroll
    for (int i = 0; i < NACC; ++i) {
      const int r = row + 8 * (i >> 1 & 1), k = col + 8 * (i >> 2) + (i & 1);
      acc[i] = e.starts() && r < m && k < n ? e.start(r, k) : 0.0f;
      if (LEAF) total[LEAF ? i : 0] = acc[i], acc[i] = 0.0f;
    }
    const int span = LEAF ? leaf : blocks;
    for (int begin = 0; begin < blocks; begin += span) {
      const int end = min(begin + span, blocks);
      for (int i = begin; i < end; ++i) {
        const u32 at = ring + stage * STAGE_BYTES;
        const u64 a = descriptor<false>(at + warpgroup * (A_BYTES / 2)), b = descriptor<false>(at + PARTS * A_BYTES);
        barrier_wait(full + 8 * stage, parity);
#if PASSES == 3
        if (TURNS) turn_take(1 + warpgroup);
        wgmma_fence();
        const u64 low_a = a + (A_BYTES >> 4), low_b = b + (B_BYTES >> 4);
        product(small, low_a, b, 0);  // order-critical: lo * hi, hi * lo
        product(small, a, low_b, 1);
        wgmma_commit();
        product(large, a, b, 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (TURNS && !(warpgroup == 1 && i + 1 == blocks && t + gridDim.x / CLUSTER >= count)) turn_give(2 - warpgroup);
        pin(small);
#pragma unroll
        for (int j = 0; j < NACC; ++j) small[j] = fabsf(small[j]) < __uint_as_float(0x7f800000) ? small[j] : 0.0f;
        wgmma_wait<0>();
        pin(large);
        release(empty + 8 * stage, lane);
#pragma unroll
        for (int j = 0; j < NACC; ++j) acc[j] = __fadd_rn(acc[j], __fadd_rn(large[j], small[j]));
#else
        wgmma_fence();
        product(acc, a, b, 1);
        wgmma_commit();
        if (i > begin) {
          wgmma_wait<1>();  // the products of the stage before are done with its buffer
          release(empty + 8 * (stage ? stage - 1 : STAGES - 1), lane);
        }
#endif
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
#if PASSES == 1
      wgmma_wait<0>();
      pin(acc);
      release(empty + 8 * (stage ? stage - 1 : STAGES - 1), lane);
#endif
#if LEAF
#pragma unroll
      for (int j = 0; j < NACC; ++j) total[j] = __fadd_rn(total[j], acc[j]), acc[j] = 0.0f;  // order-critical: ascending
#endif
    }
#pragma unroll
    for (int i = 0; i < NACC; i += 2) {
      const int r = row + 8 * (i >> 1 & 1), k = col + 8 * (i >> 2);
      float pair[2] = {LEAF ? total[LEAF ? i : 0] : acc[i], LEAF ? total[LEAF ? i + 1 : 0] : acc[i + 1]};
      if (r < m && k < n) e.store<2>(pair, r, k, n);
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
tf32(const __grid_constant__ Map map_a, const __grid_constant__ Map map_b, void* out, const void* c, const void* bias, i64 out_r,
     i64 out_c, i64 out_batch, i64 c_r, i64 c_c, i64 c_batch, i64 bias_stride, int m, int n, int blocks, int chunks, int items,
     int items_a, int items_b, int leaf, float alpha, float beta) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const u32 ring = (shared(memory) + 1023) & ~1023u, full = shared(barriers), empty = full + 8 * STAGES;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, warpgroup = warp >> 2;
  const Tiles tiles{(m + CLUSTER * BM - 1) / (CLUSTER * BM), (n + BN - 1) / BN};
  const int count = tiles.m * tiles.n * items;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 8 * CLUSTER);
    barrier_init_fence();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (warpgroup == 2) {
    fewer_registers<40>();
    if (warp == 8 && elected()) {
      map_prefetch(&map_a), map_prefetch(&map_b);
      wait_for_predecessor();
      produce(&map_a, &map_b, ring, full, empty, tiles, count, blocks, chunks, items_a, items_b);
    }
  } else {
    more_registers<232>();
    const Epilogue e{out, c, bias, out_r, out_c, 0, c_r, c_c, 0, bias_stride, alpha, beta};
    consume(e, out_batch, c_batch, ring, full, empty, tiles, count, blocks, leaf, m, n, warp, lane);
  }
}
