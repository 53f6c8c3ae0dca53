// out[i, j] = bias[j] + sum over k of x[i, k] W[j, k] for a few rows of x; W quantized, dequantized in registers.
//
// Contract   tensor_core:sm90/chain of W in float32, rounded once to the type of x: one accumulator for an element, K in
//            steps of 16, ascending. x and W are the operands of mma.sync.m16n8k16, in either order.
// Operands   x [m, k], rows of contiguous bf16 or fp16 that begin at multiples of 16 bytes; w as quant/layout.py says.
// Warps      a block walks `whole + split` tiles of 16 rows of W along all of K at once, then those
//            `gridDim.x * (whole + split)` further. A warp for each of the first; two for each of the others, eight rows
//            each: where there are few tiles, and so that quarters of a multiprocessor have equal shares.
// W          a tile has a ring of `stages` chunks of CHUNK of K, which the copy engine fills. Code is unrolled for PART of K.
// x          HOLD: all of it is brought once; else chunks of it, through a ring of `xstages` that one more warp fills.
// Launch     the packed weights change under no kernel, so their copies begin before the preceding kernel has ended.

#include "include/elements.cu"
#include "quant/codes.cu"
#include "quant/pick.cu"

// Where a weight is one product of fp16 numbers that is shorter.
constexpr bool PICKED = !(SHORT && KIND == 2);

constexpr int CHUNK_BYTES = CHUNK / Q_RECORD_K * Q_RECORD_BYTES, PART_BYTES = CHUNK_BYTES / (CHUNK / PART);
static_assert(CHUNK % Q_RECORD_K == 0 && CHUNK % PART == 0 && PART % 256 == 0);

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if KIND == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of COUNT times eight rows of W; where x is the other operand, of sixteen.
template <int COUNT> struct Sums { float v[LOW ? 1 : COUNT][NT][4]; };
// Whether W is operand A: sixteen rows of it, and up to eight of x.
template <int COUNT> constexpr bool W_FIRST = LOW && COUNT == 2;
// Where the lane's pieces of x begin, in shared memory; rows past m repeat the last one.
struct Place { u32 at[NT]; };
// 64 of K of sixteen rows of x, or for W_FIRST, of eight.
template <bool EIGHT> struct Steps {
  u32 v[EIGHT ? 2 : 4][4];
  __device__ __forceinline__ void load(u32 at) {
#pragma unroll
    for (int i = 0; i < (EIGHT ? 2 : 4); ++i) load_matrices<4, false>(v[i], at + (EIGHT ? 64 : 32) * i);
  }
};

// STEPS of 64 of K from step `first` on, for COUNT times eight of the tile's rows from half FIRST on. ALL of K is there;
// else `left` is, of one step.
template <bool ALL, int STEPS, int FIRST, int COUNT>
DEVICE void walk(Sums<COUNT>& acc, const u8* chunk, const Place& x, int first, int left, u32 lane) {
  const Picks picks(lane);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int step = first + i;
    Words words;
    Steps<W_FIRST<COUNT>> a[NT];
    const u8* const at = chunk + 64 * step / Q_RECORD_K * Q_RECORD_BYTES + 64 * step % Q_RECORD_K / 64 * Q_STEP_BYTES;
    load_words_together<PICKED && !OFFSET>(words, at, lane);
#pragma unroll
    for (int c = 0; c < NT; ++c) a[c].load(x.at[c] + 128 * step);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // order-critical: K ascending
      if (!ALL && 16 * j >= left) break;
      u32 w[4];
      const int sub = (64 * step + 16 * j) / Q_SUB;
      if constexpr (PICKED) dequantize_picked<FIRST, COUNT>(words, j, picks, scales_of(chunk, sub, lane >> 2), w);
      else dequantize(words, j, scale_of(chunk, sub, lane >> 2), w);
      if constexpr (W_FIRST<COUNT>) mma(acc.v[0][0], w, a[0].v[j / 2][j % 2 * 2], a[0].v[j / 2][j % 2 * 2 + 1]);
      else
#pragma unroll
        for (int c = 0; c < NT; ++c)
#pragma unroll
          for (int h = 0; h < COUNT; ++h) mma(acc.v[h][c], a[c].v[j], w[FIRST + h], w[FIRST + h + 2]);
    }
  }
}

DEVICE void store(void* out, i64 at, float v) {
  if (OUT == 0) ((float*)out)[at] = v;
  else ((u16*)out)[at] = narrow<OUT>(v);
}
template <int COUNT>
DEVICE void write(const Sums<COUNT>& acc, void* out, const void* bias, i64 out_ld, int row, int m, int n, u32 lane) {
  const auto put = [&](int r, int at, float value) {
    if (r >= n || at >= m) return;
    store(out, at * out_ld + r, BIAS_KIND >= 0 ? __fadd_rn(value, load_as<BIAS_KIND>(bias, r)) : value);
  };
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int high = lane >> 2, low = 2 * (lane & 3) + e % 2;
    if (W_FIRST<COUNT>) put(row + high + e / 2 * 8, low, acc.v[0][0][e]);
    else
#pragma unroll
      for (int i = 0; i < COUNT * NT; ++i) put(row + i / NT * 8 + low, 16 * (i % NT) + high + e / 2 * 8, acc.v[i / NT][i % NT][e]);
  }
}

struct Block {
  const u8* w;
  void* out;
  const void* bias;
  i64 out_ld;
  int m, n, k, stages, xstages, tiles, chunks, stride, passes, tile_bytes, own;  // own: this warp's first tile
  u32 full, empty, full_x, empty_x;  // barriers: the tile's, the block's
  u8* ring;

  __device__ __forceinline__ void load(int tile, int chunk, int stage) const {
    const int from = chunk * CHUNK_BYTES, bytes = min(CHUNK_BYTES, tile_bytes - from);
    barrier_expect(full + 8 * stage, bytes);
    bulk_load(shared(ring) + stage * CHUNK_BYTES, w + (i64)tile * tile_bytes + from, bytes, full + 8 * stage);
  }
  // The tile's buffers that are filled before anything is read: shared ones are filled one later.
  __device__ __forceinline__ int ahead_of(bool split) const { return stages - split; }
  template <int FIRST, int COUNT> __device__ __forceinline__ void run(const u32 (&x_lane)[NT], u32 x_stage, u32 lane) const {
    constexpr bool SPLIT = COUNT == 1;
    Place here;
    u32 phase = 0, x_phase = 0;
    int stage = 0, x_at = 0, ahead_chunk = ahead_of(SPLIT) % chunks, ahead = ahead_of(SPLIT) / chunks * stride + own;
    Sums<COUNT> acc;
    for (int chunk = 0, tile = own; tile < (HOLD ? tiles : passes * stride);) {
      if (SPLIT && FIRST == 0 && lane == 0 && ahead < tiles) {  // into the buffer before, when the other warp has left it
        const int before = stage == 0 ? stages - 1 : stage - 1;
        if (chunk > 0 || tile != own) barrier_wait(empty + 8 * before, stage == 0 ? phase ^ 1 : phase);
        load(ahead, ahead_chunk, before);
      }
      if (SPLIT) __syncwarp();
      if (chunk == 0) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof(acc.v) / 4); ++i) (&acc.v[0][0][0])[i] = 0.0f;
      }
      if (!HOLD) barrier_wait(full_x + 8 * x_at, x_phase);
      if (HOLD || tile < tiles) {
        const u8* at = ring + stage * CHUNK_BYTES;
        int left = k - chunk * CHUNK;
#pragma unroll
        for (int c = 0; c < NT; ++c) here.at[c] = x_lane[c] + (HOLD ? chunk * (2 * CHUNK) : x_at * x_stage);
        barrier_wait(full + 8 * stage, phase);
#pragma unroll 1
        for (; left >= PART && at < ring + stage * CHUNK_BYTES + CHUNK_BYTES; left -= PART, at += PART_BYTES) {
          walk<true, PART / 64, FIRST, COUNT>(acc, at, here, 0, left, lane);
#pragma unroll
          for (int c = 0; c < NT; ++c) here.at[c] += 2 * PART;
        }
        if (left < PART && at < ring + stage * CHUNK_BYTES + CHUNK_BYTES)
#pragma unroll 1
          for (int step = 0; 64 * step < left; ++step) walk<false, 1, FIRST, COUNT>(acc, at, here, step, left - 64 * step, lane);
        __syncwarp();
        if (!SPLIT && lane == 0 && ahead < tiles) load(ahead, ahead_chunk, stage);
        if (SPLIT && FIRST == 1 && lane == 0) barrier_arrive(empty + 8 * stage);
        if (chunk + 1 == chunks) write(acc, out, bias, out_ld, 16 * tile + 8 * FIRST, m, n, lane);
      }
      if (!HOLD && lane == 0) barrier_arrive(empty_x + 8 * x_at);
      if (!HOLD && ++x_at == xstages) x_at = 0, x_phase ^= 1;
      if (++stage == stages) stage = 0, phase ^= 1;
      if (++chunk == chunks) chunk = 0, tile += stride;
      if (++ahead_chunk == chunks) ahead_chunk = 0, ahead += stride;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_few(const u16* x, const u8* w, void* out, const void* bias, i64 x_ld, i64 out_ld, int m, int n, int k, int whole, int split,
          int stages, int xstages) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slots = whole + split, warps = slots + split;
  const u32 slot = warp < slots ? warp : warp - split;
  const u32 full_w = shared(memory), empty_w = full_w + 8 * slots * stages, full_x = empty_w + 8 * slots * stages;
  const u32 rings = (8 * 2 * (slots * stages + xstages) + 127) & ~127, slot_bytes = stages * CHUNK_BYTES;
  const u32 x_row = HOLD ? 2 * k + 16 : 2 * CHUNK + 16, x_stage = m * x_row;
  u8* const x_here = memory + rings + slots * slot_bytes;
  Block b;
  b.w = w, b.out = out, b.bias = bias, b.out_ld = out_ld, b.m = m, b.n = n, b.k = k, b.stages = stages, b.xstages = xstages;
  b.tiles = (n + 15) / 16, b.chunks = (k + CHUNK - 1) / CHUNK, b.stride = gridDim.x * slots, b.passes = (b.tiles + b.stride - 1) / b.stride;
  b.tile_bytes = (k + Q_RECORD_K - 1) / Q_RECORD_K * Q_RECORD_BYTES, b.own = slot * gridDim.x + blockIdx.x;
  b.full = full_w + 8 * slot * stages, b.empty = empty_w + 8 * slot * stages, b.full_x = full_x, b.empty_x = full_x + 8 * xstages;
  b.ring = memory + rings + slot * slot_bytes;
  if (threadIdx.x == blockDim.x - 32) {
    for (int i = 0; i < xstages; ++i) barrier_init(b.full_x + 8 * i, 1), barrier_init(b.empty_x + 8 * i, warps);
    barrier_init_fence();
  }
  if (warp < slots && lane == 0) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) barrier_init(b.full + 8 * i, 1), barrier_init(b.empty + 8 * i, 1);
    barrier_init_fence();
#pragma unroll 1
    for (int i = 0, chunk = 0, tile = b.own; i < b.ahead_of(warp >= whole) && tile < b.tiles; ++i) {
      b.load(tile, chunk, i);
      if (++chunk == b.chunks) chunk = 0, tile += b.stride;
    }
  }
  release_successor();
  __syncthreads();

#if HOLD
  if (warp == 0) {
    wait_for_predecessor();
    if (lane == 0) barrier_expect(full_x, 2 * m * k);
    __syncwarp();
    if (lane < m) bulk_load(shared(x_here) + lane * x_row, x + lane * x_ld, 2 * k, full_x);
  }
  barrier_wait(full_x, 0);
#else
  if (warp == warps) {
    wait_for_predecessor();
    u32 phase = 1;
    for (int i = 0, at = 0, stage = 0; i < b.passes * b.chunks; ++i) {
      const u32 bytes = 2 * min(CHUNK, k - at * CHUNK), bar = full_x + 8 * stage;
      barrier_wait(b.empty_x + 8 * stage, phase);
      if (lane == 0) barrier_expect(bar, m * bytes);
      __syncwarp();
      if (lane < m) bulk_load(shared(x_here) + stage * x_stage + lane * x_row, x + lane * x_ld + at * CHUNK, bytes, bar);
      if (++stage == xstages) stage = 0, phase ^= 1;
      if (++at == b.chunks) at = 0;
    }
    return;
  }
#endif
  u32 x_lane[NT];
#pragma unroll
  for (int c = 0; c < NT; ++c) {
    // Matrices as operands want them: of eight rows K 0, 8, 16 and 24; of sixteen, K 0 of rows 0 and 8, then K 8.
    const bool eight = LOW && WHOLE && warp < whole;
    const int row = eight ? lane & 7 : 16 * c + (lane & 15), piece = eight ? lane >> 3 : lane >> 4;
    x_lane[c] = shared(x_here) + min(row, m - 1) * x_row + piece * 16;
  }
#if WHOLE
  if (warp < whole) return b.run<0, 2>(x_lane, x_stage, lane);
#endif
  if (warp < slots) b.run<0, 1>(x_lane, x_stage, lane);
  else b.run<1, 1>(x_lane, x_stage, lane);
}
