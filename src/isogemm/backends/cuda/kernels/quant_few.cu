// out[i, j] = bias[j] + sum over k of x[i, k] W[j, k] for M <= 8 NT rows of x; W quantized, dequantized in registers.
//
// Contract   tensor_core:sm90/chain of W in float32, rounded once to the type of x: one accumulator for an element, K in
//            steps of 16, ascending. W is operand A of mma.sync.m16n8k16, x^T operand B.
// Operands   x [m, k], rows of contiguous bf16 or fp16 that begin at multiples of 16 bytes; w as quant_layout.py says.
// Roles      a warp walks TILES tiles of 16 rows of W along all of K at once, then those `gridDim.x * WARPS` further.
//            It has a ring of its own, STAGES chunks of 256 SPAN of K, that the copy engine fills; one more warp brings x
//            for the whole block: all of it at once (HOLD: XSTAGES chunks), or through a ring of XSTAGES chunks.
// Launch     the packed weights change under no kernel, so their copies begin before the preceding kernel has ended.

#include "hopper_ptx.cu"
#include "quant_codes.cu"

constexpr int PART = 256, CHUNK = PART * SPAN, PART_BYTES = PART / Q_RECORD_K * Q_RECORD_BYTES, CHUNK_BYTES = SPAN * PART_BYTES;
constexpr int ENTRIES = PART / Q_SUB * 8;  // of a table of scales: eight rows and their neighbours for each sub-block
constexpr int X_STEP = 2 * CHUNK + 16;  // bytes from row to row of x in shared memory: eight rows fall into different banks
constexpr int RING = TILES * CHUNK_BYTES, WARP_BYTES = STAGES * RING + TILES * ENTRIES * 16;

DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar) : "memory");
}
DEVICE void load_b(u32* b, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if KIND == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Accumulators { float v[TILES][NT][4]; };

// Up to 256 of K, `left` of them. `x_at` is the address of the lane's row of x; rows past m repeat the last one.
template <bool WHOLE> DEVICE void walk(Accumulators& acc, const u8* w, const uint4* table, const u32 (&x_at)[NT], int left, u32 lane) {
#pragma unroll
  for (int step = 0; step < PART / 64; ++step) {
    if (!WHOLE && 64 * step >= left) break;
    Words words[TILES];
    u32 b[NT][8];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      load_words(words[i], w + i * CHUNK_BYTES + 64 * step / Q_RECORD_K * Q_RECORD_BYTES + 64 * step % Q_RECORD_K / 64 * Q_STEP_BYTES, lane);
#pragma unroll
    for (int i = 0; i < NT; ++i) load_b(b[i], x_at[i] + 128 * step), load_b(b[i] + 4, x_at[i] + 128 * step + 64);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // order-critical: K ascending
      if (!WHOLE && 64 * step + 16 * j >= left) break;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        u32 a[4];
        dequantize(words[i], j, table[i * ENTRIES + (64 * step + 16 * j) / Q_SUB * 8 + (lane >> 2)], a);
#pragma unroll
        for (int c = 0; c < NT; ++c) mma(acc.v[i][c], a, b[c][2 * j], b[c][2 * j + 1]);
      }
    }
  }
}

template <int TYPE> DEVICE float load_as(const void* p, int i) {
  if (TYPE == 0) return ((const float*)p)[i];
  const u16 h = ((const u16*)p)[i];
  return TYPE == 1 ? __uint_as_float((u32)h << 16) : f16_to_float(h);
}
DEVICE void store(void* out, i64 at, float v) {
  if (OUT == 0) ((float*)out)[at] = v;
  else ((u16*)out)[at] = (u16)(OUT == 1 ? pack_bf16(v, 0.0f) : pack_f16(v, 0.0f));
}
DEVICE void write(const float (&v)[NT][4], void* out, const void* bias, i64 out_ld, int row, int m, int n, u32 lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + (lane >> 2) + 8 * half;
    if (r >= n) continue;
    const float add = BIAS_KIND >= 0 ? load_as<BIAS_KIND>(bias, r) : 0.0f;
#pragma unroll
    for (int c = 0; c < NT; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * c + 2 * (lane & 3) + e;
        const float value = v[c][2 * half + e];
        if (column < m) store(out, column * out_ld + r, BIAS_KIND >= 0 ? __fadd_rn(value, add) : value);
      }
  }
}

// The chunks of a warp in the order of its walk.
struct Cursor {
  int unit, chunk;
  __device__ __forceinline__ void next(int chunks, int stride) { if (++chunk == chunks) chunk = 0, unit += stride; }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, BLOCKS)
quant_few(const u16* x, const u8* w, void* out, const void* bias, i64 x_ld, i64 out_ld, int m, int n, int k) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[WARPS * STAGES + 2 * XSTAGES];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, full_w = shared(barriers) + 8 * warp * STAGES;
  const u32 full_x = shared(barriers) + 8 * WARPS * STAGES, empty_x = full_x + 8 * XSTAGES;
  u8* const ring = memory + warp * WARP_BYTES;
  const u32 x_ring = shared(memory + WARPS * WARP_BYTES), x_stage = m * X_STEP;
  const int tiles = (n + 15) / 16, units = (tiles + TILES - 1) / TILES, stride = gridDim.x * WARPS, chunks = (k + CHUNK - 1) / CHUNK;
  const i64 tile_bytes = (i64)((k + Q_RECORD_K - 1) / Q_RECORD_K) * Q_RECORD_BYTES;
  if (threadIdx.x == 32 * WARPS) {
    for (int i = 0; i < XSTAGES; ++i) barrier_init(full_x + 8 * i, 1), barrier_init(empty_x + 8 * i, WARPS);
    barrier_init_fence();
  }
  const auto load = [&](const Cursor& at, int stage) {
    const i64 from = (i64)at.chunk * CHUNK_BYTES;
    const u32 bytes = (u32)min((i64)CHUNK_BYTES, tile_bytes - from), bar = full_w + 8 * stage;
    barrier_expect(bar, TILES * bytes);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      bulk_load(shared(ring + stage * RING + i * CHUNK_BYTES), w + min(at.unit * TILES + i, tiles - 1) * tile_bytes + from, bytes, bar);
  };
  Cursor ahead{(int)(warp * gridDim.x + blockIdx.x), 0};
  if (warp < WARPS && lane == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full_w + 8 * i, 1);
    barrier_init_fence();
    for (int i = 0; i < STAGES && ahead.unit < units; ++i) load(ahead, i), ahead.next(chunks, stride);
  }
  release_successor();
  __syncthreads();
  const int passes = (units + stride - 1) / stride;

  if (warp == WARPS) {
    wait_for_predecessor();
    const int count = HOLD ? chunks : passes * chunks;
    if (HOLD && lane == 0) barrier_expect(full_x, 2 * m * k);
    for (int i = 0, at = 0; i < count; ++i, at = at + 1 == chunks ? 0 : at + 1) {
      const int stage = i % XSTAGES;
      const u32 bytes = 2 * min(CHUNK, k - at * CHUNK), bar = full_x + (HOLD ? 0 : 8 * stage);
      if (!HOLD) {
        if (i >= XSTAGES) barrier_wait(empty_x + 8 * stage, (i / XSTAGES & 1) ^ 1);
        if (lane == 0) barrier_expect(bar, m * bytes);
      }
      __syncwarp();
      if (lane < m) bulk_load(x_ring + stage * x_stage + lane * X_STEP, x + lane * x_ld + at * CHUNK, bytes, bar);
    }
    return;
  }

  uint4* const table = (uint4*)(ring + STAGES * RING);
  u32 x_lane[NT];
#pragma unroll
  for (int c = 0; c < NT; ++c) x_lane[c] = x_ring + min(8 * c + (int)(lane & 7), m - 1) * X_STEP + (lane >> 3) * 16;
  int stage = 0, x_at = 0;
  u32 phase = 0, x_phase = 0;
  if (HOLD) barrier_wait(full_x, 0);
  for (int unit = warp * gridDim.x + blockIdx.x, pass = 0; pass < passes; ++pass, unit += stride) {
    Accumulators acc;
#pragma unroll
    for (int i = 0; i < TILES * NT * 4; ++i) acc.v[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    const bool busy = unit < units;
    if (HOLD && !busy) break;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (!HOLD) barrier_wait(full_x + 8 * x_at, x_phase);
      if (busy) {
        const u8* at = ring + stage * RING;
        int left = k - chunk * CHUNK;
        u32 b_at[NT];
#pragma unroll
        for (int c = 0; c < NT; ++c) b_at[c] = x_lane[c] + x_at * x_stage;
        barrier_wait(full_w + 8 * stage, phase);
#pragma unroll 1
        for (int part = 0; part < SPAN; ++part) {
#pragma unroll
          for (int i = 0; i < TILES * ENTRIES / 32; ++i) {
            const int entry = i * 32 + lane;
            table[entry] = scale_of(at + entry / ENTRIES * CHUNK_BYTES, entry % ENTRIES / 8, entry % 8);
          }
          __syncwarp();
          if (left >= PART) walk<true>(acc, at, table, b_at, left, lane);
          else walk<false>(acc, at, table, b_at, left, lane);
          __syncwarp();
          left -= PART, at += PART_BYTES;
          if (left <= 0) break;
#pragma unroll
          for (int c = 0; c < NT; ++c) b_at[c] += 2 * PART;
        }
        if (lane == 0 && ahead.unit < units) load(ahead, stage), ahead.next(chunks, stride);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      if (!HOLD && lane == 0) barrier_arrive(empty_x + 8 * x_at);
      if (++x_at == (HOLD ? chunks : XSTAGES)) x_at = 0, x_phase ^= 1;
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (busy) write(acc.v[i], out, bias, out_ld, 16 * min(unit * TILES + i, tiles - 1), m, n, lane);
  }
}
