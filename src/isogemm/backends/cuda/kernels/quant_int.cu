// out[m, n] = sum over blocks of x[m, k] * W[n, k], both in blocks of integers: int32/chain for a few rows of x, where
// streaming W is the work.
//
// x as quant_activations.cu leaves it, or with FUSED, its number of rows (up to 8), as it is; W as quant_layout.py packs it. A team of GROUP warps computes 16 rows of W with 8 * NT
// rows of x. Spans of SPAN_K of K belong to its warps in turns: sums inside a block are exact integers, so each warp makes
// those of its spans alone; the chain over blocks, the one thing in order, goes from warp to warp through shared memory.
// Every warp has a ring of STAGES spans of W, which the copy engine fills before x is there. STAGED: all of x's codes fit into
// shared memory, and the block copies them there. Order-critical: a team walks
// spans, and a span its blocks, in ascending order; the bits depend on no macro.

#include "hopper_ptx.cu"
#include "fp32_epilogue.cu"
#include "quant_codes.cu"
#include "quant_int_steps.cu"
#if FUSED
#define BLOCK Q_BLOCK
#define SUB Q_SUB
namespace activations {
#include "quant_activations_steps.cu"
}
#endif

constexpr int WARPS = GROUP * TEAMS, CHUNKS = SPAN_K / 64, PER = SPAN_K / Q_RECORD_K, STAGE_BYTES = PER * Q_RECORD_BYTES;
// Chunks of 64 whose sums are made before the chain takes them: tensor cores take their time.
constexpr int HELD = GROUP > 1 || NT == 1 || CHUNKS < 2 ? CHUNKS : 2;
static_assert(WARPS <= 15 && SPAN_K % Q_RECORD_K == 0 && STAGE_BYTES % 16 == 0);

DEVICE void bulk_load(u32 to, const u8* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar) : "memory");
}

// From the first row of these on. FIXED: there are NT tiles of 8 rows, and steps are constants.
struct Activations {
  const u8* codes;
  const float* scales;
  const int* sums;
  int tiles, m;  // of 8 rows, in all; rows from the first one on
  u32 lane;
  __device__ __forceinline__ i64 rows() const { return FUSED == 1 ? 1 : FIXED ? 8 * NT : 8 * tiles; }
  __device__ __forceinline__ i64 code_rows() const { return FUSED ? FUSED : rows(); }
  // Of 64 of K and tile i; nothing where a column is past m.
  __device__ __forceinline__ uint4 codes_of(i64 chunk, int i) const {
    if (8 * i + (int)lane / 4 >= m) return make_uint4(0, 0, 0, 0);
    return *(const uint4*)(codes + chunk * (64 * code_rows()) + (32 * i + lane) * 16);
  }
  // Column 2 t of tile i; in place of tiles past the last one, the first.
  __device__ __forceinline__ int column(int i) const { return FUSED == 1 ? 0 : (8 * i < m ? 8 * i : 0) + 2 * (lane % 4); }
};

struct Turns {
  float* slot;  // [NT][4][32]
  int own, next;  // barriers
  __device__ __forceinline__ void take(float (&acc)[NT][4], u32 lane) const {
    asm volatile("bar.sync %0, 64;" ::"r"(own) : "memory");
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) acc[i / 4][i % 4] = slot[i * 32 + lane];
  }
  __device__ __forceinline__ void give(const float (&acc)[NT][4], u32 lane) const {
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) slot[i * 32 + lane] = acc[i / 4][i % 4];
    asm volatile("bar.arrive %0, 64;" ::"r"(next) : "memory");
  }
};

#if Q_BLOCK == 32
struct Span {
  int s[HELD][2][NT][4];
  Pair x[HELD][2][NT];
  Floats w[HELD][2];
  // Sums of 64 of K: two blocks.
  __device__ __forceinline__ void add(int h, const u8* record, const uint4 (&b)[NT], i64 chunk, const Activations& a) {
    Fours four;
    fours_of(four, record, a.lane);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      w[h][q] = floats_of(record, q, a.lane / 4);
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        x[h][q][i] = pair_of<PAIR>(a.scales + PAIR * ((2 * chunk + q) * a.rows() + a.column(i)));
        dot_short(s[h][q][i], four, q, &b[i].x);
      }
    }
  }
  // No chain before all of them: left to itself the compiler waits for one sum after the other.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int i = 0; i < HELD * 2 * NT * 4; i += EACH) asm volatile("" : "+r"((&s[0][0][0][0])[i]));
  }
  __device__ __forceinline__ void end(float (&acc)[NT][4], int h) const {
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int i = 0; i < NT; ++i) chain_short(acc[i], s[h][q][i], w[h][q], x[h][q][i]);
  }
};
#endif

// One span: its sums, then, when it is this warp's turn, its part of the chain.
template <bool WHOLE, class Take>
DEVICE void walk(float (&acc)[NT][4], const u8* stage, i64 span, int chunks, const Activations& a, u32 bar, u32 parity, Take take) {
  uint4 b[CHUNKS][NT];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < NT; ++i) b[c][i] = WHOLE || c < chunks ? a.codes_of(span * CHUNKS + c, i) : make_uint4(0, 0, 0, 0);
  barrier_wait(bar, parity);
#if Q_BLOCK == 32
  Span held;
#pragma unroll
  for (int first = 0; first < CHUNKS; first += HELD) {
#pragma unroll
    for (int c = 0; c < HELD; ++c)
      if (WHOLE || first + c < chunks) held.add(c, stage + (first + c) * Q_RECORD_BYTES, b[first + c], span * CHUNKS + first + c, a);
    held.settle();
    if (first == 0) take(acc);
#pragma unroll
    for (int c = 0; c < HELD; ++c)
      if (WHOLE || first + c < chunks) held.end(acc, c);
  }
#else
  int sums[NT][4] = {}, mins[NT][4] = {};
  float x[NT][2];
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const Pair two = pair_of<1>(a.scales + span * a.rows() + a.column(i));
    x[i][0] = two.d[0], x[i][1] = two.d[1];
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    Fours four;
    fours_of(four, stage + c * Q_STEP_BYTES, a.lane);
    const int* of = a.sums + (span * CHUNKS + c) * STEP_WORDS * a.rows();
    u32 ints[STEP_SUBS];
#pragma unroll
    for (int j = 0; j < STEP_SUBS; ++j) {
      ints[j] = ints_of(stage, STEP_SUBS * c + j, a.lane / 4);
#pragma unroll
      for (int i = 0; i < NT; ++i) add_sub(sums[i], four, b[c][i], j, ints[j]);
    }
#pragma unroll
    for (int j = 0; j < STEP_SUBS && SUMS; j += 2)
#pragma unroll
      for (int i = 0; i < NT; ++i) add_mins(mins[i], mins_of(ints[j], ints[j + 1]), of + j / 2 * a.rows() + a.column(i));
  }
  const Floats w = floats_of(stage, 0, a.lane / 4);
  take(acc);
#pragma unroll
  for (int i = 0; i < NT; ++i) chain_long(acc[i], sums[i], mins[i], w, x[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
#if FUSED
quant_int(const u8* w, const void* x, i64 x_row, i64 x_column, void* out, const void* bias, i64 out_r, i64 out_c, i64 bias_stride, int m, int n, int k) {
#else
quant_int(const u8* w, const u8* x_codes, const float* x_scales, const int* x_sums, void* out, const void* bias, i64 out_r,
          i64 out_c, i64 bias_stride, int m, int n, int k) {
#endif
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[WARPS * STAGES];
  __shared__ float slots[GROUP > 1 ? TEAMS : 1][NT * 4][32];
  const int warp = threadIdx.x / 32, team = warp / GROUP, part = warp % GROUP, tile = blockIdx.x * TEAMS + team;
  const u32 lane = threadIdx.x % 32, ring = shared(memory) + warp * STAGES * STAGE_BYTES, full = shared(barriers + warp * STAGES);
  const int spans = (k + SPAN_K - 1) / SPAN_K, records = (k + Q_RECORD_K - 1) / Q_RECORD_K;
  const bool idle = 16 * tile >= n;
  if (!FUSED && !STAGED && idle) return;
  const u8* from = w + (i64)tile * records * Q_RECORD_BYTES;
  const auto fill = [&](int i) {
    const int span = part + i * GROUP, s = i % STAGES;
    if (span >= spans || idle) return;
    const u32 bytes = min(records - span * PER, PER) * Q_RECORD_BYTES;
    barrier_expect(full + 8 * s, bytes);
    bulk_load(ring + s * STAGE_BYTES, from + (i64)span * STAGE_BYTES, bytes, full + 8 * s);
  };
  if (lane == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1);
    barrier_init_fence();
    for (int s = 0; s < STAGES; ++s) fill(s);
  }
  __syncwarp();
  wait_for_predecessor();
  release_successor();  // which waits for the end of this kernel: it may prepare
  const int first = FIXED ? 0 : blockIdx.y * (8 * NT);
#if FUSED
  // Every block makes the codes of its own, in shared memory, while W is on its way.
  constexpr int ROWS = FUSED == 1 ? 1 : 8;
  const int steps = (k + 63) / 64;
  u8* x_codes = memory + WARPS * STAGES * STAGE_BYTES;
  float* x_scales = (float*)(x_codes + 64 * FUSED * steps);
  int* x_sums = (int*)(x_scales + ROWS * PAIR * ((64 * steps + Q_BLOCK - 1) / Q_BLOCK));
  for (int i = warp; i < (k + 255) / 256 * FUSED; i += WARPS) {
    const int row = i % FUSED, at = i / FUSED * 256 + 8 * lane;
    activations::quantize(x, row * x_row, x_column, at, k, x_codes, 64 * FUSED, row, x_scales, x_sums, row, ROWS, lane);
  }
  __syncthreads();
  if (idle) return;
#endif
#if STAGED
  // x into shared memory, for all warps of the block.
  __shared__ alignas(8) u64 arrival;
  const u32 there = shared(&arrival), steps = (k + 63) / 64, blocks = (64 * steps + Q_BLOCK - 1) / Q_BLOCK;
  const u32 code_bytes = 64 * 8 * NT * steps, scale_bytes = 4 * 8 * NT * PAIR * blocks;
  const u32 sum_bytes = SHORT_BLOCKS ? 0 : 4 * 8 * NT * STEP_WORDS * steps, at = WARPS * STAGES * STAGE_BYTES;
  if (threadIdx.x == 0) {
    barrier_init(there, 1);
    barrier_init_fence();
    barrier_expect(there, code_bytes + scale_bytes + sum_bytes);
    bulk_load(shared(memory) + at, x_codes, code_bytes, there);
    bulk_load(shared(memory) + at + code_bytes, (const u8*)x_scales, scale_bytes, there);
    if (sum_bytes) bulk_load(shared(memory) + at + code_bytes + scale_bytes, (const u8*)x_sums, sum_bytes, there);
  }
  __syncthreads();
  if (idle) return;
  barrier_wait(there, 0);
  x_codes = memory + at, x_scales = (const float*)(x_codes + code_bytes), x_sums = (const int*)(x_codes + code_bytes + scale_bytes);
#endif
  const Activations a{x_codes + first * 64, x_scales + first * (SHORT_BLOCKS ? PAIR : 1), x_sums + first, (m + 7) / 8, m - first, lane};
  const Turns turns{slots[GROUP > 1 ? team : 0][0], 1 + warp, 1 + team * GROUP + (part + 1) % GROUP};
  float acc[NT][4] = {};
  for (int i = 0, span = part; span < spans; ++i, span += GROUP) {
    const int s = i % STAGES, chunks = min((k + 63) / 64 - span * CHUNKS, CHUNKS);
    const u8* stage = memory + (warp * STAGES + s) * STAGE_BYTES;
    const auto take = [&](float (&sum)[NT][4]) {
      if (GROUP > 1 && span > 0) turns.take(sum, lane);
    };
    if (chunks == CHUNKS) walk<true>(acc, stage, span, chunks, a, full + 8 * s, i / STAGES & 1, take);
    else walk<false>(acc, stage, span, chunks, a, full + 8 * s, i / STAGES & 1, take);
    if (GROUP > 1 && span + 1 < spans) turns.give(acc, lane);
    __syncwarp();
    if (lane == 0) fill(i + STAGES);
  }
  if (GROUP > 1 && (spans - 1) % GROUP != part) return;
  const Epilogue e{out, nullptr, bias, out_r, out_c, 0, 0, 0, 0, bias_stride, TYPES, 1.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < NT; ++i) {
#pragma unroll
    for (int j = 0; j < 4; j += EACH) {
      const int row = first + 8 * i + 2 * (lane % 4) + j % 2, column = 16 * tile + lane / 4 + 8 * (j / 2);
      float v = acc[i][j];
      if (row < m) e.store<1>(&v, row, column, n);
    }
  }
}
