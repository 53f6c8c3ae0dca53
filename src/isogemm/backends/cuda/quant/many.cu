// out[m, n] = sum over k of x[m, k] * W[n, k], W packed as quant/layout.py says: dequantized into the registers of wgmma.
//
// Operands   x of bf16 or fp16, a map (1, token, k), K-major; records of W, by tiles of 16 rows.
// Order      weights are rounded once to the type of x; every element of out walks K in ascending blocks of 16, one
//            instruction each, in one float32 accumulator from zero. What is behind K is zero on both sides.
// Roles      WARPGROUPS consumers, each with MW blocks of 64 rows of W and BN tokens: rows of W are the rows of an
//            instruction, tokens its columns. One warp of the last warpgroup fills a ring of STAGES buffers of 64 of K. A
//            consumer dequantizes the next stage while the tensor cores multiply this one: two sets of registers in turns.
// Clusters   CM blocks take neighbouring rows of W and the same tokens: each loads 1 / CM of x for all of them.
// Late       launched behind another part of the same product, which has seen its predecessor end: nothing to wait for.
// Scales     those of super-blocks serve SPAN stages and come with the first; SLOTS of them outlive all stages of the ring.

#include "include/elements.cu"
#include "include/hopper_epilogue.cu"
#define KIND OPERAND
#include "quant/codes.cu"
#undef KIND

constexpr int THREADS = 128 * (WARPGROUPS + 1), NACC = BN / 2;
constexpr int BM = 64 * MW * WARPGROUPS, TILES = BM / 16;  // rows, and tiles of W, of a block
constexpr int SPAN = Q_RECORD_K / 64, CODE_BYTES = SPAN > 1 ? Q_STEP_BYTES : Q_RECORD_BYTES, SCALE_BYTES = Q_RECORD_BYTES - Q_FLOATS;
constexpr bool WHOLE = false;
constexpr int KS = 1, EVERY = SPAN, BX = BN, X_BYTES = BX * 128, RAW_BYTES = (TILES * CODE_BYTES + 1023) / 1024 * 1024;
constexpr int STAGE_BYTES = X_BYTES + RAW_BYTES;
constexpr int SLOTS = SPAN > 1 ? (STAGES + 2 * SPAN - 2) / SPAN : 0, SLOT_BYTES = (TILES * SCALE_BYTES + 127) / 128 * 128;

#include "quant/ring.cu"
#include "quant/bring.cu"

typedef u32 Fragments[MW][4];  // of 16 of K and each block of 64 rows

// A warp's codes of a buffer and what scales them, for each block; those of sub-blocks of 16 are read one at a time.
struct Raw {
  Words w[MW];
  uint4 s[MW][Q_SUB == 16 ? 1 : 64 / Q_SUB];
};

struct Consumer {
  u8* memory;  // of the ring; behind it, the scales
  u32 ring, full, empty, first, lane;
  Place at;  // the buffer that is being dequantized

  __device__ __forceinline__ uint4 scale(int m, int sub, const Place& p) const {
    const u8* codes = memory + p.stage * STAGE_BYTES + X_BYTES + (first + 4 * m) * CODE_BYTES;
    const u8* scales = memory + STAGES * STAGE_BYTES + p.slot * SLOT_BYTES + (first + 4 * m) * SCALE_BYTES - Q_FLOATS;
    const u32 step = SPAN > 1 ? p.step : 0;
    __builtin_assume(step < SPAN);
    return scale_of(SPAN > 1 ? scales : codes, step * (64 / Q_SUB) + sub, lane >> 2);
  }
  __device__ __forceinline__ void read(Raw& raw, const Place& p) const {
    barrier_wait(full + 8 * p.stage, p.parity);
#pragma unroll
    for (int m = 0; m < MW; ++m) {
      load_words_together<false>(raw.w[m], memory + p.stage * STAGE_BYTES + X_BYTES + (first + 4 * m) * CODE_BYTES, lane);
#pragma unroll
      for (int sub = 0; sub < (Q_SUB == 16 ? 1 : 64 / Q_SUB); ++sub) raw.s[m][sub] = scale(m, sub, p);
    }
  }
  // Weights of the buffer `at`, 16 of K from 16 j on.
  __device__ __forceinline__ void fragment(Fragments& a, Raw& raw, int j) const {
#pragma unroll
    for (int m = 0; m < MW; ++m) {
      if (Q_SUB == 16 && j > 0) raw.s[m][0] = scale(m, j, at);
      dequantize(raw.w[m], j, raw.s[m][Q_SUB == 16 ? 0 : j * 16 / Q_SUB], a[m]);
    }
  }
  // Order-critical: K ascending.
  __device__ __forceinline__ void multiply(float (&acc)[MW][NACC], const Fragments& a, u32 stage, int j, int& scale) const {
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < MW; ++m) mma(acc[m], a[m], descriptor<false>(ring + stage * STAGE_BYTES) + (j * 32 >> 4), scale);
    wgmma_commit();
    scale = 1;
  }
  // A buffer but for its last product, which the next one's first weights are to be made beside.
  template <bool MORE>
  __device__ __forceinline__ void step(float (&acc)[MW][NACC], Fragments (&a)[2], Raw& raw, u32& before, int& scale) {
    Raw then;
    Place p = at;
    p.next();
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      multiply(acc, a[j & 1], at.stage, j, scale);
      if (j == 2 && MORE) read(then, p);
      wgmma_wait<1>();
      if (j == 0 && before < STAGES) release(before);
      fragment(a[(j + 1) & 1], raw, j + 1);
    }
    multiply(acc, a[1], at.stage, 3, scale);
    before = at.stage;
    at = p;
    if (MORE) {
      wgmma_wait<1>();
      raw = then;
      fragment(a[0], raw, 0);
    }
  }
  // The products of a tile. While the tensor cores multiply 16 of K, the next 16 are dequantized: a warp cannot go on
  // beyond a product whose weights are in registers before they are taken, so work is dealt out in pieces this small.
  // (Weights by way of shared memory, from warps of their own, are quant/apart.cu's: slower for tiles of this size.)
  __device__ __forceinline__ void walk(float (&acc)[MW][NACC], int iters) {
    Fragments a[2];
    Raw raw;
    int scale = 0;
    u32 before = STAGES;
    read(raw, at);
    fragment(a[0], raw, 0);
#pragma unroll 1
    for (int i = 1; i < iters; ++i) step<true>(acc, a, raw, before, scale);
    step<false>(acc, a, raw, before, scale);
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int m = 0; m < MW; ++m) pin(acc[m]);
  }
  // A warp has left a buffer: tell every block that writes into it.
  __device__ __forceinline__ void release(u32 stage) const {
    if (CM == 1) {
      if (lane == 0) barrier_arrive(empty + 8 * stage);
    } else if (lane < CM) {
      barrier_arrive_at(empty + 8 * stage, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_many(const __grid_constant__ Map map_x, const __grid_constant__ Map map_w, const __grid_constant__ Map map_s, u8* out,
           const void* bias, i64 out_ld, i64 bias_step, int n, int m, int iters, int tiles_w, int tiles_x, int group, int late) {
  extern __shared__ u8 dynamic[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  u8* memory = dynamic + (-shared(dynamic) & 1023);
  const u32 ring = shared(memory), full = shared(barriers), empty = full + 8 * STAGES;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, warpgroup = warp >> 2;
  const Plan plan{tiles_w, tiles_x, group};

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 4 * WARPGROUPS * CM);
    barrier_init_fence();
  }
  if (CM > 1) cluster_sync();
  else __syncthreads();

  if (warpgroup == WARPGROUPS) {  // the producer
    fewer_registers<PRODUCER_REGISTERS>();
    if (warp == 4 * WARPGROUPS && elected()) {
      map_prefetch(&map_x), map_prefetch(&map_w);
      if (SPAN > 1) map_prefetch(&map_s);
      const Producer from{&map_x, &map_w, &map_s, ring, full};
      const int t = cluster_id();
      fill(from, plan, t, cluster_count, t < plan.count() ? min(iters, STAGES) : 0, iters, empty, late);
    }
  } else {  // consumers
    more_registers<CONSUMER_REGISTERS>();
    if (!late) wait_for_predecessor();
    Epilogue e{out, nullptr, bias, out_ld, 0, 0, 0, 0, bias_step, n, m, 1.0f, 0.0f};
    e.pieces = memory + STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES;
    Consumer c{memory, ring, full, empty, warpgroup * 4 * MW + (warp & 3), lane, {0, 0, 0, 0}};
    float acc[MW][NACC];
    for (int t = cluster_id(); t < plan.count(); t += cluster_count()) {
      const Block tile = plan[t];
      c.walk(acc, iters);
#pragma unroll
      for (int j = 0; j < MW; ++j) store_block(e, acc[j], tile.row + 64 * (warpgroup * MW + j), tile.col, 0, threadIdx.x);
    }
  }
  if (late) wait_for_predecessor();  // whoever waits for this launch waits for that one too
}
