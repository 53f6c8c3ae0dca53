// out[m, n] = sum over k of x[m, k] * W[n, k], W packed as quant/layout.py says: warps of their own dequantize it into shared
// memory, where wgmma takes it from.
//
// Operands   x of bf16 or fp16, a map (1, token, k), K-major; records of W, by tiles of 16 rows.
// Order      weights are rounded once to the type of x; every element of out walks K in ascending blocks of 16, one
//            instruction each, in one float32 accumulator from zero. What is behind K is zero on both sides.
// Tile       BW rows of W by BX of x. W_FIRST: rows of W are the rows of an instruction, those of x its columns; else the
//            other way round. A last block of 64 may have fewer: the rest is what follows in memory, and nobody's.
// Roles      WARPGROUPS consumers, each with MW blocks of 64 rows of the first operand and BN columns; DECODERS warps that
//            dequantize; one that fills a ring of STAGES buffers of KS times 64 of K. Warps take a stage's pieces in turns,
//            EACH times 16 rows and 64 of K, to one of MADE buffers, in the layout of wgmma.
// Scales     of super-blocks come with every stage, into a slot of its own, as a warp does not see all of them arrive.

#include "include/elements.cu"
#include "include/hopper_epilogue.cu"
#define KIND OPERAND
#include "quant/codes.cu"
#undef KIND

constexpr int THREADS = 128 * WARPGROUPS + 32 * DECODERS + 32, NACC = BN / 2;
constexpr int BM = BW, TILES = BW / 16;  // rows, and tiles of W, of a block
constexpr int SPAN = Q_RECORD_K / 64, CODE_BYTES = SPAN > 1 ? Q_STEP_BYTES : Q_RECORD_BYTES, SCALE_BYTES = Q_RECORD_BYTES - Q_FLOATS;
constexpr int X_BYTES = BX * 128, W_BYTES = BW * 128, MADE_BYTES = KS * W_BYTES;
constexpr int RAW_BYTES = TILES * CODE_BYTES, STAGE_BYTES = (KS * (X_BYTES + RAW_BYTES) + 1023) / 1024 * 1024;
constexpr int EVERY = KS, SLOTS = SPAN > 1 ? STAGES : 0, SLOT_BYTES = (TILES * SCALE_BYTES + 127) / 128 * 128;
constexpr int JOBS = KS * TILES / EACH;  // of a stage
static_assert(KS * TILES % EACH == 0 && (KS % EACH == 0 || EACH % KS == 0));
static_assert(SPAN == 1 || SPAN % KS == 0);
// Parities tell a phase from the next one alone. A warp that has seen consumers leave the stage MADE before its own knows all
// up to there to have been full; what it waits for next, AHEAD stages on, has to be less than a ring behind that.
constexpr int AHEAD = (DECODERS + JOBS - 1) / JOBS;
static_assert(MADE >= AHEAD && STAGES >= MADE + AHEAD);

constexpr int CM = 1;  // no clusters: blocks that share x were 4 % slower on an H200
#include "quant/ring.cu"
#include "quant/bring.cu"

struct Decoder {
  const u8 *memory, *scales;  // of the ring, of the slots
  u32 made, full, empty, done, lane;

  // Piece `job` of the stage at p, into buffer `into`, which is free once the stage at `before`, if there is one, has been left.
  // Pieces lie side by side along K or, where one has all of a stage's, along rows.
  __device__ __forceinline__ void run(const Place& p, const Place& before, bool wait, u32 into, int job) const {
    const int tile = KS >= EACH ? job % TILES : job % (TILES * KS / EACH) * (EACH / KS), s = KS > EACH ? job / TILES * EACH : 0;
    barrier_wait(full + 8 * p.stage, p.parity);
    const u8* codes = memory + p.stage * STAGE_BYTES + KS * X_BYTES + s * RAW_BYTES + tile * CODE_BYTES;
    const u8* records = SPAN > 1 ? scales + p.stage * SLOT_BYTES + tile * SCALE_BYTES - Q_FLOATS : codes;
    Words words[EACH];
    uint4 by[EACH][64 / Q_SUB];
    u32 first = SPAN > 1 ? p.step + s : 0;
    __builtin_assume(first <= SPAN - (KS < EACH ? KS : EACH));
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int up = e % KS, over = e / KS;  // of K, of rows
      load_words_together<false>(words[e], codes + up * RAW_BYTES + over * CODE_BYTES, lane);
      const u32 step = SPAN > 1 ? first + up : 0;
      const u8* of = records + (SPAN > 1 ? over * SCALE_BYTES : up * RAW_BYTES + over * CODE_BYTES);
#pragma unroll
      for (int i = 0; i < 64 / Q_SUB; ++i) by[e][i] = scale_of(of, step * (64 / Q_SUB) + i, lane >> 2);
    }
    const u32 row = (lane >> 3 & 1) * 8 + (lane & 7);
    const u32 at = made + into * MADE_BYTES + s * W_BYTES + tile * 2048 + row * 128, chunk = (lane >> 4 ^ lane & 7) << 4;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 a[4];
        dequantize(words[e], j, by[e][j * 16 / Q_SUB], a);
        if (e == 0 && j == 0 && wait) barrier_wait(empty + 8 * before.stage, before.parity);
        store_matrices(at + (e % KS) * W_BYTES + e / KS * 2048 + (chunk ^ j << 5), a);
      }
    }
    fence_async_proxy();  // wgmma reads it
    __syncwarp();
    if (lane == 0) barrier_arrive(done + 8 * into);
  }
  // All pieces of `stages` stages that are this warp's.
  __device__ __forceinline__ void walk(int warp, int stages) const {
    Place p{0, 0, 0, 0}, before{0, 0, 0, 0};
    u32 into = 0;
    int i = 0;
    u32 job = warp;
    const auto next = [&] {
      const u32 n = job / JOBS;  // stages
      if (n == 0) return;
      job -= n * JOBS, i += n;
      p.stage += n;
      if (p.stage >= STAGES) p.stage -= STAGES, p.parity ^= 1;
      if (SPAN > KS) p.step = (p.step + n * KS) % SPAN;
      into = (into + n) % MADE;
      if (i >= MADE) {  // MADE stages before p
        const bool turned = p.stage < MADE;
        before.stage = turned ? p.stage + STAGES - MADE : p.stage - MADE, before.parity = p.parity ^ turned;
      }
    };
    next();
#pragma unroll 1
    while (i < stages) {
      run(p, before, i >= MADE, into, job);
      job += DECODERS;
      next();
    }
  }
};

// A descriptor by its lower half. Consumers keep that from stage to stage: where it is made from the base anew, the compiler
// asks for the block's place in its cluster each time, and an instruction waits for the answer.
DEVICE u64 matrix(u32 low, u32 bytes) { return (u64)0x40000040 << 32 | (low + (bytes >> 4)); }

struct Consumer {
  u32 lane, x, w;        // lower halves of descriptors, of this warpgroup's rows where they are the first operand's
  u32 stage, empty;      // of the ring, and its barrier
  u32 into, done, turn;  // of the buffers of weights

  __device__ __forceinline__ void release(u32 bar) const {  // a warp has left a buffer
    if (lane == 0) barrier_arrive(bar);
  }
  // The products of a tile. Order-critical: K ascending. Whoever made the weights of a stage has seen its x arrive.
  __device__ __forceinline__ void walk(float (&acc)[MW][NACC], int iters) {
    constexpr int LAST = 4 * KS - 1, ASIDE = WARPGROUPS == 1 ? LAST / 2 : LAST;  // as gemm/hopper/hopper.cu says
    int scale = 0;
    u32 previous = 0;
    bool filled = false;
    wgmma_fence();
#pragma unroll 1
    for (int i = 0; i < iters; ++i) {
      if (!filled) barrier_wait(done, turn);
      const u32 x_here = x, w_here = w;
#pragma unroll
      for (int k = 0; k <= LAST; ++k) {
#pragma unroll
        for (int m = 0; m < MW; ++m) {
          const u64 dx = matrix(x_here, k / 4 * X_BYTES + k % 4 * 32 + (W_FIRST ? 0 : m * 8192));
          const u64 dw = matrix(w_here, k / 4 * W_BYTES + k % 4 * 32 + (W_FIRST ? m * 8192 : 0));
          mma(acc[m], W_FIRST ? dw : dx, W_FIRST ? dx : dw, scale);
        }
        scale = 1;
        if (k == ASIDE) {
          const u32 here = empty;
          x += STAGE_BYTES >> 4, empty += 8;
          if (++stage == STAGES) stage = 0, x -= STAGES * STAGE_BYTES >> 4, empty -= 8 * STAGES;
          w += MADE_BYTES >> 4, done += 8;
          if (++into == MADE) into = 0, w -= MADE * MADE_BYTES >> 4, done -= 8 * MADE, turn ^= 1;
          filled = barrier_passed(done, turn);
          wgmma_commit();
          wgmma_wait<1>();
          if (i > 0) release(previous);
          previous = here;
        }
      }
      if (ASIDE < LAST) wgmma_commit();
    }
    wgmma_wait<0>();
    release(previous);
#pragma unroll
    for (int m = 0; m < MW; ++m) pin(acc[m]);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_apart(const __grid_constant__ Map map_x, const __grid_constant__ Map map_w, const __grid_constant__ Map map_s, u8* out,
            const void* bias, i64 out_ld, i64 bias_step, int n, int m, int iters, int tiles_w, int tiles_x, int group) {
  extern __shared__ u8 dynamic[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + MADE];
  u8* memory = dynamic + (-shared(dynamic) & 1023);
  const u32 made = shared(memory), ring = made + MADE * MADE_BYTES;
  const u32 full = shared(barriers), empty = full + 8 * STAGES, done = empty + 8 * STAGES;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, warpgroup = warp >> 2;
  const Plan plan{tiles_w, tiles_x, group};

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 4 * WARPGROUPS);
    for (int s = 0; s < MADE; ++s) barrier_init(done + 8 * s, JOBS);
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= 4 * WARPGROUPS + DECODERS) {
    if (warp == 4 * WARPGROUPS + DECODERS && elected()) {
      map_prefetch(&map_x), map_prefetch(&map_w);
      if (SPAN > 1) map_prefetch(&map_s);
      const Producer from{&map_x, &map_w, &map_s, ring, full};
      const int t = cluster_id();
      fill(from, plan, t, cluster_count, t < plan.count() ? min(iters, STAGES) : 0, iters, empty, false);
    }
  } else if (warp >= 4 * WARPGROUPS) {
    const int t = cluster_id(), tiles = t < plan.count() ? (plan.count() - 1 - t) / cluster_count() + 1 : 0;
    Decoder{memory + MADE * MADE_BYTES, memory + MADE * MADE_BYTES + STAGES * STAGE_BYTES, made, full, empty, done, lane}
        .walk(warp - 4 * WARPGROUPS, tiles * iters);
  } else {  // consumers
    wait_for_predecessor();
    const int rows = W_FIRST ? n : m;
    Epilogue e{out, nullptr, bias, out_ld, 0, 0, 0, 0, bias_step, rows, W_FIRST ? m : n, 1.0f, 0.0f};
    e.pieces = memory + MADE * MADE_BYTES + STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES;
    const u32 block = warpgroup * MW * 8192;
    Consumer c{lane, (u32)descriptor<false>(ring + (W_FIRST ? 0 : block)), (u32)descriptor<false>(made + (W_FIRST ? block : 0)),
               0, empty, 0, done, 0};
    float acc[MW][NACC];
    for (int t = cluster_id(); t < plan.count(); t += cluster_count()) {
      const Block tile = plan[t];
      c.walk(acc, iters);
      const int row = W_FIRST ? tile.row : tile.col, col = W_FIRST ? tile.col : tile.row;
      e.rows = min(rows, row + (W_FIRST ? BW : BX));
#pragma unroll
      for (int j = 0; j < MW; ++j) store_block(e, acc[j], row + 64 * (warpgroup * MW + j), col, 0, threadIdx.x);
    }
  }
}
