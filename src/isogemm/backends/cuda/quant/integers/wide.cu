// out[m, n] = sum over blocks of x[m, k] * W[n, k], both in blocks of integers: int32/chain, by wgmma on float16.
//
// Operands   x as quant/integers/codes_wide.cu leaves it, maps (1, row, k); records of W as quant/layout.py packs them.
// Exactness  codes of x are integers up to 127, operands of W integers of 11 bits: q, or s q of super-blocks. Every sum
//            that a float32 accumulator takes on stays below 2**24, so nothing is rounded, in whatever order the tensor
//            core sums: at most 256 * 128 * 127 in Q3_K, and in Q4_K 128 * 945 * 127 over PART of a super-block, of
//            which two are added with one rounding, float(S). (s q of Q5_K and Q6_K would need more parts.)
// Order      for each block in ascending order, S before T: one fused multiply-add each, by the element's thread.
// Roles      WARPGROUPS consumers, each with 64 rows of W and BN rows of x: rows of W are the rows of an instruction,
//            rows of x its columns. One more warpgroup fills a ring of STAGES buffers of 64 of K. While tensor cores
//            multiply, chains are walked.
// Scales     those of super-blocks serve SPAN stages and come with the first; SLOTS of them outlive the ring's stages
//            and the first half of the next record, beside which a record's chains are walked.

#define KIND 2
#define EACH 1
#include "include/elements.cu"
#include "include/fp32_epilogue.cu"
#include "quant/codes.cu"
#include "quant/integers/steps.cu"

constexpr int THREADS = 128 * (WARPGROUPS + 1), NACC = BN / 2, TILES = 4 * WARPGROUPS, BM = 16 * TILES;
constexpr bool OFFSET = Q_FLOATS_EACH == 2;
constexpr int PART = SHORT_BLOCKS ? 32 : Q_LOW + Q_HIGH <= 3 ? 256 : 128;
static_assert(SHORT_BLOCKS || Q_LOW + Q_HIGH <= 4);
constexpr int SPAN = Q_RECORD_K / 64, CODE_BYTES = SPAN > 1 ? Q_STEP_BYTES : Q_RECORD_BYTES;
constexpr int SCALE_BYTES = Q_RECORD_BYTES - Q_FLOATS;
// A stage: x, W's codes, and with short blocks a line of BN scales of x to a block, or two.
constexpr int LINES = SHORT_BLOCKS ? (OFFSET ? 4 : 2) : 0, X_BYTES = BN * 128;
constexpr int W_BYTES = (TILES * CODE_BYTES + 127) / 128 * 128;
constexpr int LINES_AT = X_BYTES + W_BYTES, STAGE_BYTES = (LINES_AT + LINES * BN * 4 + 1023) / 1024 * 1024;
// A slot: W's scales, the line of x's, and sums of its codes.
constexpr int SLOTS = SPAN > 1 ? (STAGES + 2 * SPAN) / SPAN : 0, SUMS_BYTES = OFFSET && SPAN > 1 ? BN * 32 : 0;
constexpr int LINE_AT = SUMS_BYTES, SCALES_AT = LINE_AT + (BN * 4 + 127) / 128 * 128;
constexpr int SLOT_BYTES = (SCALES_AT + TILES * SCALE_BYTES + 255) / 256 * 256;

constexpr int CM = 1, KS = 1, EVERY = SPAN, BX = BN;  // no clusters
#include "quant/ring.cu"

struct Maps { const Map *x, *w, *s, *d, *t; };  // codes of x, of W; scales of super-blocks; scales and sums of x

// One thread brings stages. What lies outside of x and of W comes as zeros.
struct Producer {
  Maps map;
  u32 ring, full;

  __device__ __forceinline__ u32 slot(const Place& p) const {
    return ring + STAGES * STAGE_BYTES + p.slot * SLOT_BYTES;
  }
  __device__ __forceinline__ void bring_w(const Block& tile, int i, const Place& p) const {
    const bool scales = SPAN > 1 && i % SPAN == 0;
    const u32 at = ring + p.stage * STAGE_BYTES + X_BYTES, bar = full + 8 * p.stage;
    const int record = i / SPAN * Q_RECORD_BYTES, row = tile.row / 16;
    const u32 more = TILES * SCALE_BYTES + BN * 4 + SUMS_BYTES;
    barrier_expect(bar, X_BYTES + TILES * CODE_BYTES + LINES * BN * 4 + (scales ? more : 0));
    tma_load(at, map.w, bar, SPAN > 1 ? (record + i % SPAN * Q_STEP_BYTES) / 8 : 0, row, SPAN > 1 ? 0 : i, 0);
    if (scales) tma_load(slot(p) + SCALES_AT, map.s, bar, (record + Q_FLOATS) / 8, row, 0, 0);
  }
  __device__ __forceinline__ void bring_x(const Block& tile, int i, const Place& p) const {
    const u32 at = ring + p.stage * STAGE_BYTES, bar = full + 8 * p.stage;
    tma_load(at, map.x, bar, i * 64, tile.col, 0, 0);
    if (LINES) tma_load(at + LINES_AT, map.d, bar, tile.col, i * LINES, 0, 0);
    if (SPAN > 1 && i % SPAN == 0) {
      tma_load(slot(p) + LINE_AT, map.d, bar, tile.col, i / SPAN, 0, 0);
      if (SUMS_BYTES) tma_load(slot(p), map.t, bar, i / SPAN * 16, tile.col, 0, 0);
    }
  }
};

// Byte `at` of a word, twice, as float16; `less` is what was added to it.
DEVICE u32 byte_pair(u32 x, int at, u32 less) {
  return add_pair(__byte_perm(x, 0x64, 0x4040 | at | at << 8), (0xe400u + less) * 0x10001u);
}
// A code's place among the bits of float16: 1024 + code * 2**at.
DEVICE u32 raw_pair(const Words& w, int field, int high) { return pair(w, field, high, in_place(field), 0x64006400u); }
DEVICE constexpr u32 half_of(int power) { return (15 + power) << 10; }  // 2**power
// q: codes less the zero point.
DEVICE u32 code_pair(const Words& w, int field, int high) {
  const int at = in_place(field);
  const u32 x = raw_pair(w, field, high);
  if (!at) return add_pair(x, (0xe400u + Q_ZERO) * 0x10001u);
  return fma_pair(x, half_of(-at) * 0x10001u, (0x8000u + half_of(10 - at) + (Q_ZERO << at)) * 0x10001u);
}

// What super-blocks multiply codes by: s of rows g and g + 8.
struct Factor { u32 s[2]; };
DEVICE Factor factor_of(const u8* record, int sub, u32 g) {
  u32 ints = ints_of(record, sub, g);
  if (Q_JOINT) ints &= 0x0f0f;
  if (Q_SIGNED) ints ^= 0x8080;
  Factor f;
#pragma unroll
  for (int half = 0; half < 2; ++half) f.s[half] = byte_pair(ints, Q_INTS_EACH * half, Q_SIGNED ? 128 : 0);
  return f;
}

// As wgmma_wait and pin, but shared memory may be read before: whatever is read was waited for long before.
template <int N> DEVICE void wait_group() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N)); }
template <int N> DEVICE void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i]));
}

// What consumers find in shared memory.
struct Reader {
  u8* memory;  // of the ring; behind it, the slots
  u32 ring, full, empty, first, lane;
  Place at;

  __device__ __forceinline__ const u8* stage() const { return memory + at.stage * STAGE_BYTES; }
  __device__ __forceinline__ const u8* codes() const { return stage() + X_BYTES + first * CODE_BYTES; }
  __device__ __forceinline__ const u8* slot_at(u32 slot) const {
    return memory + STAGES * STAGE_BYTES + slot * SLOT_BYTES;
  }
  // Where a record would begin whose scales are in a slot.
  __device__ __forceinline__ const u8* record_at(u32 slot) const {
    return slot_at(slot) + SCALES_AT + first * SCALE_BYTES - Q_FLOATS;
  }
  __device__ __forceinline__ u64 operand(int j) const {
    return descriptor<false>(ring + at.stage * STAGE_BYTES) + (j * 32 >> 4);
  }
  __device__ __forceinline__ void release(u32 stage) const {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * stage);
  }

};

#if Q_BLOCK == 32
#include "quant/integers/short.cu"
#else
#include "quant/integers/long.cu"
#endif

// A thread's elements: row of x and column of out are its first ones.
template <int A, int B>
DEVICE void store_tile(const Epilogue& e, float (&acc)[A][B], int row, int column, int m, int n) {
  constexpr int SIZE = (TYPES & 15) ? 2 : 4;
  u8* line = (u8*)e.out + SIZE * (row * e.out_r + column * e.out_c);
#pragma unroll
  for (int j = 0; j < BN / 4; ++j) {
    const int r = row + j / 2 * 8 + j % 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (r >= m || column + 8 * half >= n) continue;
      const int i = j / 2 * 4 + 2 * half + j % 2;
      const float v = e.finish(acc[i / B][i % B], r, column + 8 * half);
      u8* to = line + SIZE * 8 * half * e.out_c;
      if (SIZE == 4) *(float*)to = v;
      else *(u16*)to = Epilogue::narrow(v, TYPES & 15);
    }
    line += SIZE * e.out_r * (j % 2 ? 7 : 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_int_wide(const __grid_constant__ Map map_x, const __grid_constant__ Map map_w, const __grid_constant__ Map map_s,
               const __grid_constant__ Map map_d, const __grid_constant__ Map map_t, void* out, const void* bias,
               i64 out_r, i64 out_c, i64 bias_stride, int m, int n, int iters, int tiles_w, int tiles_x, int group) {
  extern __shared__ u8 dynamic[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  u8* memory = dynamic + (-shared(dynamic) & 1023);
  const u32 ring = shared(memory), full = shared(barriers), empty = full + 8 * STAGES;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, warpgroup = warp >> 2;
  const Plan plan{tiles_w, tiles_x, group};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 4 * WARPGROUPS);
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == WARPGROUPS) {  // the producer
    fewer_registers<PRODUCER_REGISTERS>();
    if (warp == 4 * WARPGROUPS && elected()) {
      const Producer from{{&map_x, &map_w, &map_s, &map_d, &map_t}, ring, full};
      fill(from, plan, blockIdx.x, [] { return gridDim.x; }, min(iters, STAGES), iters, empty, false);
    }
  } else {  // consumers
    more_registers<CONSUMER_REGISTERS>();
    wait_for_predecessor();
    const Epilogue e{out, nullptr, bias, out_r, out_c, 0, 0, 0, 0, bias_stride, 1.0f, 0.0f};
    Consumer c{{memory, ring, full, empty, warp, lane, {0, 0, 0, 0}}};
    for (int t = blockIdx.x; t < plan.count(); t += gridDim.x) {
      const Block tile = plan[t];
      float acc[HALVES][NACC / HALVES] = {};
      c.walk(acc, iters);
      store_tile(e, acc, tile.col + 2 * (lane % 4), tile.row + warp * 16 + lane / 4, m, n);
    }
  }
}
