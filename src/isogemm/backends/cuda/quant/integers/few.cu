// out[m, n] = sum over blocks of x[m, k] * W[n, k], both in blocks of integers: int32/chain for a few rows of x, where
// streaming W is the work.
//
// x as quant/integers/activations.cu leaves it (blocks of 32: with HALVES), or with FUSED, its number of rows (up to 8), as it is; W
// as quant/layout.py packs it. A team of GROUP warps computes 16 rows of W with 8 * NT rows of x. Spans of SPAN_K of K belong
// to its warps in turns: sums inside a block are exact integers, so each warp makes those of its spans alone; the chain over
// blocks, the one thing in order, goes from warp to warp through shared memory. The last SPLIT teams are two each, with half
// of those rows of x, so that each of a multiprocessor's schedulers has as much to do as the others.
// Every warp, or both of a split team, have a ring of STAGES spans of W, which the copy engine fills before x is there.
// STAGED: all of x's codes fit into shared memory, and the block copies them there.
// Order-critical: a team walks spans, and a span its blocks, in ascending order; the bits depend on no macro.

#include "include/elements.cu"
#include "include/fp32_epilogue.cu"
#include "quant/codes.cu"
#include "quant/integers/steps.cu"
#if FUSED
#define BLOCK Q_BLOCK
#define SUB Q_SUB
#define HALVES (Q_BLOCK == 32)
namespace activations {
#include "quant/integers/code_steps.cu"
}
#endif

constexpr int SLOTS = GROUP * TEAMS, WHOLE_SLOTS = GROUP * (TEAMS - SPLIT), WARPS = SLOTS + GROUP * SPLIT;
constexpr int CHUNKS = SPAN_K / 64, BLOCKS = SPAN_K / 32, PER = SPAN_K / Q_RECORD_K;
constexpr int STAGE_BYTES = PER * Q_RECORD_BYTES;
constexpr int PIECES = 4;  // of x, one after the other into shared memory
// Blocks of 32 whose sums with `tiles` of x are made before the chain takes the first of them: tensor cores take their
// time, and a turn of the chain is short if nothing but the chain is left to do. Registers bound them.
DEVICE constexpr int held_of(int tiles) {
  const int most = WARPS > 16 || tiles > 2 ? 2 : GROUP > 1 && STAGED && !SUMS && WARPS <= 12 ? 8 : 8 / tiles;
  const int ahead = SUMS ? most / 2 : most;
  return BLOCKS < ahead ? BLOCKS : ahead;
}
static_assert(GROUP == 1 || WARPS <= 15);  // named barriers
static_assert((SPLIT == 0 || STAGED && NT % 2 == 0) && (FIXED || !STAGED));
static_assert(SPAN_K % Q_RECORD_K == 0 && STAGE_BYTES % 16 == 0);

// Of weights, which are read once: what else is in L2 stays there.
DEVICE void bulk_load_once(u32 to, const u8* from, u32 bytes, u32 bar) {
  asm volatile(
      "{\n.reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], once;\n}" ::"r"(to), "l"(from),
      "r"(bytes), "r"(bar) : "memory");
}
// Whether the other warp that reads a stage has done so.
DEVICE bool last_of(u32 at) {
  u32 before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], 1;" : "=r"(before) : "r"(at) : "memory");
  return before;
}

#include "quant/integers/walk.cu"

// What a warp does: its spans of a tile of 16 rows of W, with 8 * N rows of x.
struct Job {
  const u8* stages;       // of its ring
  u32 full, uses, there;  // their barriers, whether one of two warps has read them; barriers of pieces of x
  float4* slot;           // where the chain is handed on
  int own, next, part;    // barriers of its turn and of the following one; the first span
  int row, tile, m, n, k;
};
template <int N, class Fill> DEVICE void work(const Job& job, const Activations& a, const Epilogue& e, Fill fill) {
  const Turns<N> turns{job.slot, job.own, job.next};
  const int steps = (job.k + 63) / 64, spans = (job.k + SPAN_K - 1) / SPAN_K, each = (spans + PIECES - 1) / PIECES;
  int piece = 0, there = STAGED ? 0 : spans;  // spans of x that are there
  float acc[N][4] = {};
  for (int i = 0, span = job.part; span < spans; ++i, span += GROUP) {
    const int s = i % STAGES, chunks = min(steps - span * CHUNKS, CHUNKS);
    const u8* stage = job.stages + s * STAGE_BYTES;
    for (; span >= there; there += each) barrier_wait(job.there + 8 * piece++, 0);
    const auto take = [&](float (&sum)[N][4]) {
      if (GROUP > 1 && span > 0) turns.take(sum, a.lane);
    };
    if (chunks == CHUNKS) walk<true>(acc, stage, span, chunks, a, job.full + 8 * s, i / STAGES & 1, take);
    else walk<false>(acc, stage, span, chunks, a, job.full + 8 * s, i / STAGES & 1, take);
    if (GROUP > 1 && span + 1 < spans) turns.give(acc, a.lane);
    __syncwarp();
    if (a.lane == 0 && (N == NT || last_of(job.uses + 4 * s))) fill(i + STAGES);
  }
  if (GROUP > 1 && (spans - 1) % GROUP != job.part) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < 4; j += EACH) {
      const int row = job.row + 8 * i + 2 * (a.lane % 4) + j % 2, column = 16 * job.tile + a.lane / 4 + 8 * (j / 2);
      float v = acc[i][j];
      if (row < job.m) e.store<1>(&v, row, column, job.n);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
#if FUSED
quant_int(const u8* w, const void* x, i64 x_row, i64 x_column, void* out, const void* bias, i64 out_r, i64 out_c,
          i64 bias_stride, int m, int n, int k) {
#else
quant_int(const u8* w, const u8* x_codes, const float* x_scales, const int* x_sums, void* out, const void* bias, i64 out_r,
          i64 out_c, i64 bias_stride, int m, int n, int k, int part_rows, i64 part_bytes) {
  // Parts of x, side by side: each has codes, scales and sums of its own.
  const i64 begin = (i64)blockIdx.z * part_rows, codes_begin = blockIdx.z * part_bytes;
  x_codes += codes_begin, x_scales = (const float*)((const u8*)x_scales + codes_begin);
  x_sums = (const int*)((const u8*)x_sums + codes_begin), out = (u8*)out + begin * out_r * ((TYPES & 255) == 0 ? 4 : 2);
  m = min(m - (int)begin, part_rows);
#endif
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[SLOTS * STAGES];
  __shared__ float4 slots[GROUP > 1 ? TEAMS : 1][NT * 32];
  __shared__ u32 uses[SPLIT ? GROUP * SPLIT * STAGES : 1];
  const int warp = threadIdx.x / 32, pair = (warp - WHOLE_SLOTS) / 2, half = warp < WHOLE_SLOTS ? 0 : (warp - WHOLE_SLOTS) % 2;
  const int place = warp < WHOLE_SLOTS ? warp : WHOLE_SLOTS + pair, team = place / GROUP, part = place % GROUP;
  const int tile = blockIdx.x * TEAMS + team;
  const u32 lane = threadIdx.x % 32, ring = shared(memory) + place * STAGES * STAGE_BYTES;
  const u32 full = shared(barriers + place * STAGES);
  const int spans = (k + SPAN_K - 1) / SPAN_K, records = (k + Q_RECORD_K - 1) / Q_RECORD_K;
  const bool idle = 16 * tile >= n;
  if (!FUSED && !STAGED && idle) return;
  const u8* from = w + (i64)tile * records * Q_RECORD_BYTES;
  const auto fill = [&](int i) {
    const int span = part + i * GROUP, s = i % STAGES;
    if (span >= spans || idle) return;
    const u32 bytes = min(records - span * PER, PER) * Q_RECORD_BYTES;
    barrier_expect(full + 8 * s, bytes);
    bulk_load_once(ring + s * STAGE_BYTES, from + (i64)span * STAGE_BYTES, bytes, full + 8 * s);
  };
  if (lane == 0 && half == 0) {
    for (int s = 0; s < STAGES; ++s)
      barrier_init(full + 8 * s, 1), uses[warp < WHOLE_SLOTS ? 0 : pair * STAGES + s] = 0;
    barrier_init_fence();
    for (int s = 0; s < (STAGED ? 1 : STAGES); ++s) fill(s);
  }
#if !STAGED
  __syncwarp();
  wait_for_predecessor();
  release_successor();  // which waits for the end of this kernel: it may prepare
#endif
  const int first = FIXED ? 4 * NT * half : blockIdx.y * (8 * NT);
#if FUSED
  // Every block makes the codes of its own, in shared memory, while W is on its way.
  constexpr int ROWS = FUSED == 1 ? 1 : 8;
  const int steps = (k + 63) / 64;
  u8* x_codes = memory + SLOTS * STAGES * STAGE_BYTES;
  float* x_scales = (float*)(x_codes + 64 * FUSED * steps);
  int* x_sums = (int*)(x_scales + ROWS * (SHORT_BLOCKS ? steps : (steps + 3) / 4));
  for (int i = warp; i < (k + 255) / 256 * FUSED; i += WARPS) {
    const int row = i % FUSED, at = i / FUSED * 256 + 8 * lane;
    activations::quantize(x, row * x_row, x_column, at, k, x_codes, 64 * FUSED, row, x_scales, x_sums, row, ROWS, lane);
  }
  __syncthreads();
  if (idle) return;
#endif
  u32 there = 0;
#if STAGED
  // x into shared memory, for all warps of the block, in pieces of `each` spans; scales and sums with the first.
  __shared__ alignas(8) u64 arrivals[PIECES];
  there = shared(arrivals);
  const u32 steps = (k + 63) / 64, each = (spans + PIECES - 1) / PIECES;
  const u32 scale_bytes = 4 * 8 * NT * (SHORT_BLOCKS ? steps : (steps + 3) / 4);
  const u32 sum_bytes = SUMS ? 4 * 8 * NT * (SHORT_BLOCKS ? 2 : STEP_WORDS) * steps : 0;
  const u32 code_bytes = 64 * 8 * NT * steps, piece_bytes = 64 * 8 * NT * CHUNKS * each;
  const u32 at = SLOTS * STAGES * STAGE_BYTES;
  const bool brings = threadIdx.x == 32 * (WARPS - 1);
  if (brings) {
    for (int i = 0; i < PIECES; ++i) barrier_init(there + 8 * i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (brings) {
    for (int s = 1; s < STAGES && half == 0; ++s) fill(s);
    wait_for_predecessor();
    release_successor();  // which waits for the end of this kernel: it may prepare
    for (u32 i = 0, from = 0; from < code_bytes; ++i, from += piece_bytes) {
      const u32 bytes = min(piece_bytes, code_bytes - from), to = shared(memory) + at, bar = there + 8 * i;
      barrier_expect(bar, bytes + (i ? 0 : scale_bytes + sum_bytes));
      bulk_load(to + from, x_codes + from, bytes, bar);
      if (i) continue;
      bulk_load(to + code_bytes, (const u8*)x_scales, scale_bytes, bar);
      if (sum_bytes) bulk_load(to + code_bytes + scale_bytes, (const u8*)x_sums, sum_bytes, bar);
    }
  } else if (lane == 0 && half == 0 && !idle) {
    // One after the other: a long queue for W would hold up the kernel before this one, which makes the codes of x.
    for (int s = 1; s < STAGES; ++s) {
      while (!barrier_passed(full + 8 * (s - 1), 0) && !barrier_passed(there, 0)) {}
      fill(s);
    }
  }
  __syncwarp();
  if (idle) return;
  x_codes = memory + at, x_scales = (const float*)(x_codes + code_bytes);
  x_sums = (const int*)(x_codes + code_bytes + scale_bytes);
#endif
  const Activations a{x_codes + first * 64, x_scales + first, x_sums + first, (m + 7) / 8, m - first, lane};
  const Epilogue e{out, nullptr, bias, out_r, out_c, 0, 0, 0, 0, bias_stride, 1.0f, 0.0f};
  const int following = team * GROUP + (part + 1) % GROUP;
  const int next = warp < WHOLE_SLOTS ? following : half + 2 * following - WHOLE_SLOTS;
  const Job job{memory + place * STAGES * STAGE_BYTES, full, shared(uses + (warp < WHOLE_SLOTS ? 0 : pair * STAGES)), there,
                slots[GROUP > 1 ? team : 0] + half * 16 * NT, 1 + warp, 1 + next, part, first, tile, m, n, k};
#if TEAMS > SPLIT
  if (warp < WHOLE_SLOTS) return work<NT>(job, a, e, fill);
#endif
#if SPLIT
  work<NT / 2>(job, a, e, fill);
#endif
}
