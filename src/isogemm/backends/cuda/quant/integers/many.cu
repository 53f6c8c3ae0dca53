// out[m, n] = sum over blocks of x[m, k] * W[n, k], both in blocks of integers: int32/chain, in tiles.
//
// x as quant/integers/activations.cu leaves it, W as quant/layout.py packs it. A block computes BM = 16 * MI * WARPS_M rows of W with
// BN = 8 * NJ * WARPS_N rows of x, a warp MI tiles of 16 with NJ tiles of 8. A ring of STAGES buffers holds
// SPAN_K of K of both; with PRODUCER one more warp fills it, else warps do so in turns; a buffer holds W's records, one row tile after the other, then x's codes, sums and scales.
// Order-critical: spans ascend, and blocks of K in a span; every element belongs to one thread.

#define EACH 1
#include "include/elements.cu"
#include "include/fp32_epilogue.cu"
#include "quant/codes.cu"
#include "quant/integers/steps.cu"

constexpr int WARPS = WARPS_M * WARPS_N, BM = 16 * MI * WARPS_M, BN = 8 * NJ * WARPS_N, TILES_W = BM / 16, TILES_X = BN / 8;
constexpr int CHUNKS = SPAN_K / 64, PER = SPAN_K / Q_RECORD_K, W_BYTES = PER * Q_RECORD_BYTES;
// Lines of BN rows of x in a span: of scales, with a sum to each in blocks of 32, else one; and those of sums behind them.
constexpr int LINES = SHORT_BLOCKS ? 2 * CHUNKS : 1, LINE_BYTES = BN * (SHORT_BLOCKS ? 4 * PAIR : 4);
constexpr int SUMS_LINES = SHORT_BLOCKS ? 0 : STEP_WORDS * CHUNKS, SUMS_BYTES = BN * 4;
constexpr int CODES = TILES_W * W_BYTES, SCALE_AT = CODES + CHUNKS * TILES_X * 512, SUM_AT = SCALE_AT + LINES * LINE_BYTES;
constexpr int STAGE_BYTES = (SUM_AT + SUMS_LINES * SUMS_BYTES + 127) / 128 * 128;
constexpr int COPIES = TILES_W + CHUNKS + LINES + SUMS_LINES;
static_assert(SPAN_K % Q_RECORD_K == 0 && W_BYTES % 16 == 0 && CODES % 16 == 0);

struct Source {
  const u8 *w, *codes, *scales, *sums;
  i64 records, tiles;  // records of a row tile of W; tiles of 8 rows of x
  int tile_w, tiles_w, tile_x, tiles_x, chunks;  // the first tiles, how many there are here, and chunks of 64 of all of K
  // Copy `i` of a span: where from, where to in the buffer, and how many bytes.
  __device__ __forceinline__ u32 copy(int i, int span, u32 to, u32 bar) const {
    const u8* from;
    u32 bytes;
    const int here = min(CHUNKS, chunks - span * CHUNKS);
    if (i < TILES_W) {
      if (i >= tiles_w) return 0;
      bytes = min((int)records - span * PER, PER) * Q_RECORD_BYTES;
      from = w + ((i64)(tile_w + i) * records + (i64)span * PER) * Q_RECORD_BYTES, to += i * W_BYTES;
    } else if ((i -= TILES_W) < CHUNKS) {
      if (i >= here) return 0;
      bytes = tiles_x * 512;
      from = codes + ((i64)(span * CHUNKS + i) * tiles + tile_x) * 512, to += CODES + i * (TILES_X * 512);
    } else if ((i -= CHUNKS) < LINES) {
      if (SHORT_BLOCKS && i >= 2 * here) return 0;
      constexpr int SIZE = LINE_BYTES / TILES_X;
      bytes = tiles_x * SIZE;
      from = scales + (((i64)span * LINES + i) * tiles + tile_x) * SIZE, to += SCALE_AT + i * LINE_BYTES;
    } else {
      i -= LINES, bytes = tiles_x * 32;
      from = sums + (((i64)span * SUMS_LINES + i) * tiles + tile_x) * 32, to += SUM_AT + i * SUMS_BYTES;
    }
    if (bar) bulk_load(to, from, bytes, bar);
    return bytes;
  }
  __device__ __forceinline__ void fill(int span, u32 to, u32 bar, u32 lane) const {
    u32 bytes = 0;
    for (int i = lane; i < COPIES; i += 32) bytes += copy(i, span, to, 0);
    bytes = __reduce_add_sync(~0u, bytes);
    if (lane == 0) barrier_expect(bar, bytes);
    __syncwarp();
    for (int i = lane; i < COPIES; i += 32) copy(i, span, to, bar);
  }
};

struct Consumer {
  int tile_w, tile_x;  // of this warp in the block
  u32 lane;

  __device__ __forceinline__ const u8* record(const u8* stage, int i) const { return stage + (tile_w + i) * W_BYTES; }
  __device__ __forceinline__ uint4 codes(const u8* stage, int c, int j) const {
    return *(const uint4*)(stage + CODES + ((c * TILES_X + tile_x + j) * 32 + lane) * 16);
  }
  // A column of tile j in line `i` of scales, and column 2 t in one of sums.
  __device__ __forceinline__ const float* scales(const u8* stage, int i, int j, int column) const {
    return (const float*)(stage + SCALE_AT + i * LINE_BYTES) + ((tile_x + j) * 8 + column) * (SHORT_BLOCKS ? PAIR : 1);
  }
  __device__ __forceinline__ const int* sums(const u8* stage, int i, int j) const {
    return (const int*)(stage + SUM_AT + i * SUMS_BYTES) + (tile_x + j) * 8 + 2 * (lane % 4);
  }

#if Q_BLOCK == 32
  __device__ __forceinline__ void walk(float (&acc)[MI][NJ][4], const u8* stage, int chunks) const {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      Fours a[MI];
      Floats w[MI][2];
#pragma unroll
      for (int i = 0; i < MI; ++i) {
        const u8* r = record(stage, i) + c * Q_RECORD_BYTES;
        fours_of(a[i], r, lane);
        w[i][0] = floats_of(r, 0, lane / 4), w[i][1] = floats_of(r, 1, lane / 4);
      }
#pragma unroll
      for (int j = 0; j < NJ; ++j) {
        const uint4 b = codes(stage, c, j);
        const u32 y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const Pair x = pair_of<PAIR>(scales(stage, 2 * c + q, j, 2 * (lane % 4)));
#pragma unroll
          for (int i = 0; i < MI; ++i) {
            int s[4];
            dot_short(s, a[i], q, y);
            chain_short(acc[i][j], s, w[i][q], x);
          }
        }
      }
    }
  }
#else
  __device__ __forceinline__ void walk(float (&acc)[MI][NJ][4], const u8* stage, int) const {
    int s[MI][NJ][4] = {};
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c) {
      Fours a[MI];
      u32 ints[MI][STEP_SUBS];
#pragma unroll
      for (int i = 0; i < MI; ++i) {
        fours_of(a[i], record(stage, i) + c * Q_STEP_BYTES, lane);
#pragma unroll
        for (int q = 0; q < STEP_SUBS; ++q) ints[i][q] = ints_of(record(stage, i), c * STEP_SUBS + q, lane / 4);
      }
#pragma unroll
      for (int j = 0; j < NJ; ++j) {
        const uint4 b = codes(stage, c, j);
#pragma unroll
        for (int q = 0; q < STEP_SUBS; ++q)
#pragma unroll
          for (int i = 0; i < MI; ++i) add_sub(s[i][j], a[i], b, q, ints[i][q]);
      }
    }
    u32 mins[MI][SUMS ? SUMS_LINES : 1];
    Floats w[MI];
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      w[i] = floats_of(record(stage, i), 0, lane / 4);
#pragma unroll
      for (int q = 0; q < SUMS_LINES; ++q)
        mins[i][q] = mins_of(ints_of(record(stage, i), 2 * q, lane / 4), ints_of(record(stage, i), 2 * q + 1, lane / 4));
    }
#pragma unroll
    for (int j = 0; j < NJ; ++j) {
      const float2 two = *(const float2*)scales(stage, 0, j, 2 * (lane % 4));
      const float x[2] = {two.x, two.y};
      int t[MI][4] = {};
#pragma unroll
      for (int q = 0; q < SUMS_LINES; ++q)
#pragma unroll
        for (int i = 0; i < MI; ++i) add_mins(t[i], mins[i][q], sums(stage, q, j));
#pragma unroll
      for (int i = 0; i < MI; ++i) chain_long(acc[i][j], s[i][j], t[i], w[i], x);
    }
  }
#endif
};

// A warp that fills the ring has a warpgroup of its own, whose registers the others get.
extern "C" __global__ void __launch_bounds__(32 * WARPS + (PRODUCER ? 128 : 0), BLOCKS)
quant_int_many(const u8* w, const u8* x_codes, const u8* x_scales, const u8* x_sums, void* out, const void* bias, i64 out_r,
               i64 out_c, i64 bias_stride, int m, int n, int k) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const u32 full = shared(barriers), empty = full + 8 * STAGES, lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32, spans = (k + SPAN_K - 1) / SPAN_K, chunks = (k + 63) / 64;
  // Blocks of rows of x are neighbours: W is read from memory once.
  const int blocks_x = (m + BN - 1) / BN, tile_x = blockIdx.x % blocks_x * TILES_X, tile_w = blockIdx.x / blocks_x * TILES_W;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, WARPS);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_predecessor();
  release_successor();
  const int all_w = (n + 15) / 16, all_x = (m + 7) / 8;
  const Source from{w, x_codes, x_scales, x_sums, (k + Q_RECORD_K - 1) / Q_RECORD_K, all_x, tile_w, min(TILES_W, all_w - tile_w),
                    tile_x, min(TILES_X, all_x - tile_x), chunks};
  const u32 ring = shared(memory);
  if (PRODUCER && warp >= WARPS) {
    if (WARPS == 8 && BLOCKS == 1) fewer_registers<40>();
    if (warp > WARPS) return;
    for (int i = 0; i < spans; ++i) {
      const int s = i % STAGES;
      barrier_wait(empty + 8 * s, (i / STAGES & 1) ^ 1);
      from.fill(i, ring + s * STAGE_BYTES, full + 8 * s, lane);
    }
    return;
  }
  if (PRODUCER && WARPS == 8 && BLOCKS == 1) more_registers<232>();
  if (!PRODUCER && warp == 0)
    for (int i = 0; i < min(STAGES, spans); ++i) from.fill(i, ring + i * STAGE_BYTES, full + 8 * i, lane);
  const Consumer c{warp / WARPS_N * MI, warp % WARPS_N * NJ, lane};
  float acc[MI][NJ][4] = {};
  for (int i = 0; i < spans; ++i) {
    const int s = i % STAGES, left = (i + STAGES - 1) % STAGES;
    if (!PRODUCER && i > 0 && warp == i % WARPS && i - 1 + STAGES < spans) {  // the buffer that all warps have left, or are about to leave
      barrier_wait(empty + 8 * left, (i - 1) / STAGES & 1);
      from.fill(i - 1 + STAGES, ring + left * STAGE_BYTES, full + 8 * left, lane);
    }
    barrier_wait(full + 8 * s, i / STAGES & 1);
    c.walk(acc, memory + s * STAGE_BYTES, min(chunks - i * CHUNKS, CHUNKS));
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * s);
  }
  const Epilogue e{out, nullptr, bias, out_r, out_c, 0, 0, 0, 0, bias_stride, 1.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < NJ; ++j)
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int row = (tile_x + c.tile_x + j) * 8 + 2 * (lane % 4) + q % 2, column = (tile_w + c.tile_w + i) * 16 + lane / 4 + q / 2 * 8;
        if (row < m) e.store<1>(&acc[i][j][q], row, column, n);
      }
}
