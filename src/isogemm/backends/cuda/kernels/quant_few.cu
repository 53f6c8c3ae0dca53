// out[i, j] = bias[j] + sum over k of x[i, k] W[j, k] for M <= 8 NT rows of x; W quantized, dequantized in registers.
//
// Contract   tensor_core:sm90/chain of W in float32, rounded once to the type of x: one accumulator for an element, K in
//            steps of 16, ascending. W is operand A of mma.sync.m16n8k16, x^T operand B.
// Operands   x [m, k], rows of contiguous bf16 or fp16 that begin at multiples of 16 bytes; w as quant_layout.py says.
// Roles      a warp walks TILES tiles of 16 rows of W along all of K at once, then those `gridDim.x * WARPS` further.
//            It has a ring of its own, STAGES chunks of 256 SPAN of K, that the copy engine fills; one more warp brings x
//            for the whole block: all of it at once (HOLD: XSTAGES chunks), or through a ring of XSTAGES chunks.
// Balance    ROTATE: tiles outnumber no warps, and after each chunk they go round among the warps, so that no quarter of
//            the multiprocessor keeps one more than the others. Accumulators travel through shared memory: bits stay.
// Launch     the packed weights change under no kernel, so their copies begin before the preceding kernel has ended.

#include "hopper_ptx.cu"
#include "quant_codes.cu"

constexpr int PART = 256, CHUNK = PART * SPAN, PART_BYTES = PART / Q_RECORD_K * Q_RECORD_BYTES, CHUNK_BYTES = SPAN * PART_BYTES;
constexpr int ENTRIES = PART / Q_SUB * 8;  // of a table of scales: eight rows and their neighbours for each sub-block
constexpr int X_STEP = 2 * CHUNK + 16;  // bytes from row to row of x in shared memory: eight rows fall into different banks
constexpr int RING = TILES * CHUNK_BYTES, SLOT_BYTES = STAGES * RING + (ROTATE ? TILES * NT * 512 : 0), TABLE_BYTES = TILES * ENTRIES * 16;

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
#pragma unroll UNROLL
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

extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, BLOCKS)
quant_few(const u16* x, const u8* w, void* out, const void* bias, i64 x_ld, i64 out_ld, int m, int n, int k) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[SLOTS * (STAGES + 1) + 2 * XSTAGES];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, full_w = shared(barriers), done = full_w + 8 * SLOTS * STAGES;
  const u32 full_x = done + 8 * SLOTS, empty_x = full_x + 8 * XSTAGES;
  const u32 x_ring = shared(memory + SLOTS * SLOT_BYTES + WARPS * TABLE_BYTES), x_stage = m * X_STEP;
  const int tiles = (n + 15) / 16, units = (tiles + TILES - 1) / TILES, chunks = (k + CHUNK - 1) / CHUNK;
  const int stride = gridDim.x * SLOTS, passes = (units + stride - 1) / stride;
  const int tile_bytes = (k + Q_RECORD_K - 1) / Q_RECORD_K * Q_RECORD_BYTES;
  if (threadIdx.x == 32 * WARPS) {
    for (int i = 0; i < XSTAGES; ++i) barrier_init(full_x + 8 * i, 1), barrier_init(empty_x + 8 * i, WARPS);
    barrier_init_fence();
  }
  const auto load = [&](int slot, int unit, int chunk, int stage) {
    const int from = chunk * CHUNK_BYTES, bytes = min(CHUNK_BYTES, tile_bytes - from);
    const u32 bar = full_w + 8 * (slot * STAGES + stage), to = shared(memory) + slot * SLOT_BYTES + stage * RING;
    barrier_expect(bar, TILES * bytes);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      bulk_load(to + i * CHUNK_BYTES, w + (i64)min(unit * TILES + i, tiles - 1) * tile_bytes + from, bytes, bar);
  };
  if (warp < SLOTS && lane == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full_w + 8 * (warp * STAGES + i), 1);
    barrier_init(done + 8 * warp, 1);
    barrier_init_fence();
    for (int i = 0, chunk = 0, unit = warp * gridDim.x + blockIdx.x; i < STAGES && unit < units; ++i) {
      load(warp, unit, chunk, i);
      if (++chunk == chunks) chunk = 0, unit += stride;
    }
  }
  release_successor();
  __syncthreads();

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

  uint4* const table = (uint4*)(memory + SLOTS * SLOT_BYTES + warp * TABLE_BYTES);
  u32 x_lane[NT];
#pragma unroll
  for (int c = 0; c < NT; ++c) x_lane[c] = x_ring + min(8 * c + (int)(lane & 7), m - 1) * X_STEP + (lane >> 3) * 16;
  int stage = 0, x_at = 0, turn = 0;
  u32 phase = 0, x_phase = 0;
  int ahead_chunk = STAGES % chunks, ahead_unit = STAGES / chunks * stride + blockIdx.x;  // without the slot's part
  if (HOLD) barrier_wait(full_x, 0);
  Accumulators acc;
  for (int step = 0, chunk = 0, first = blockIdx.x; first < passes * stride; ++step) {
    // Chosen by simulation of 16 warps on four schedulers, for 9 to 14 slots.
    const int place = ROTATE ? (warp - 7 * step) & 15 : warp, back = place - turn;
    const int slot = ROTATE ? (back < 0 ? back + SLOTS : back) : warp, unit = first + slot * gridDim.x;
    if (!HOLD) barrier_wait(full_x + 8 * x_at, x_phase);
    if (place < SLOTS && unit < units) {
      u8* const ring = memory + slot * SLOT_BYTES;
      float4* const kept = (float4*)(ring + STAGES * RING) + lane;
      if (ROTATE && step) barrier_wait(done + 8 * slot, step - 1 & 1);
#pragma unroll
      for (int i = 0; i < TILES * NT; ++i) {
        float (&v)[4] = acc.v[i / NT][i % NT];
        if (chunk == 0) {
          v[0] = v[1] = v[2] = v[3] = 0.0f;
        } else if (ROTATE) {
          const float4 x = kept[32 * i];
          v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        }
      }
      const u8* at = ring + stage * RING;
      int left = k - chunk * CHUNK;
      u32 b_at[NT];
#pragma unroll
      for (int c = 0; c < NT; ++c) b_at[c] = x_lane[c] + x_at * x_stage;
      barrier_wait(full_w + 8 * (slot * STAGES + stage), phase);
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
      const int next = ahead_unit + slot * gridDim.x;
      if (lane == 0 && next < units) load(slot, next, ahead_chunk, stage);
      if (chunk + 1 == chunks) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) write(acc.v[i], out, bias, out_ld, 16 * min(unit * TILES + i, tiles - 1), m, n, lane);
      } else if (ROTATE) {
#pragma unroll
        for (int i = 0; i < TILES * NT; ++i) {
          const float (&v)[4] = acc.v[i / NT][i % NT];
          kept[32 * i] = make_float4(v[0], v[1], v[2], v[3]);
        }
      }
      if (ROTATE) {
        __syncwarp();
        if (lane == 0) barrier_arrive(done + 8 * slot);
      }
    }
    if (!HOLD && lane == 0) barrier_arrive(empty_x + 8 * x_at);
    if (++x_at == (HOLD ? chunks : XSTAGES)) x_at = 0, x_phase ^= 1;
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if (++turn == SLOTS) turn = 0;
    if (++chunk == chunks) chunk = 0, first += stride;
    if (++ahead_chunk == chunks) ahead_chunk = 0, ahead_unit += stride;
  }
}
