// out[i, j] = bias[j] + sum over k of x[i, k] W[j, k] for M <= 8 NT rows of x; W quantized, dequantized in registers.
//
// Contract   tensor_core:sm90/chain of W in float32, rounded once to the type of x: one accumulator for an element, K in
//            steps of 16, ascending. W is operand A of mma.sync.m16n8k16, x^T operand B.
// Operands   x [m, k], rows of contiguous bf16 or fp16 that begin at multiples of 16 bytes; w as quant_layout.py says.
// Roles      a block walks `slots` tiles of 16 rows of W along all of K at once, a warp for each, then those
//            `gridDim.x * slots` further. A slot has a ring of `stages` chunks of 256 SPAN of K, which the copy engine
//            fills; one more warp brings x for the block: all of it (HOLD), or through a ring of `xstages` chunks.
// Balance    ROTATE: after each chunk the slots go round among 16 warps, so that no quarter of the multiprocessor keeps
//            one more than the others. Accumulators travel through shared memory: bits stay.
// Launch     the packed weights change under no kernel, so their copies begin before the preceding kernel has ended.

#include "hopper_ptx.cu"
#include "quant_codes.cu"

constexpr int PART = 256, CHUNK = PART * SPAN, PART_BYTES = PART / Q_RECORD_K * Q_RECORD_BYTES, CHUNK_BYTES = SPAN * PART_BYTES;
constexpr int ENTRIES = PART / Q_SUB * 8, TABLE_BYTES = 16 * ENTRIES;  // scales of eight rows and their neighbours, by sub-block
constexpr int X_STEP = 2 * CHUNK + 16;  // bytes from row to row of x in shared memory: eight rows fall into different banks
constexpr int KEPT_BYTES = ROTATE ? NT * 512 : 0;

DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar) : "memory");
}
// Chunks of a slot that are summed up. Warps may be several apart, more than the two phases of an mbarrier could tell.
DEVICE void wait_until(u32 at, int count) {
  int seen;
  do asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(seen) : "r"(at) : "memory");
  while (seen < count);
}
DEVICE void say(u32 at, int count) { asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
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

struct Sums { float v[NT][4]; };

// Up to 256 of K, `left` of them. `x_at` is where the lane's pieces of x begin, in shared memory; rows past m repeat the
// last one.
template <bool WHOLE> DEVICE void walk(Sums& acc, const u8* part, const uint4* table, const u32 (&x_at)[NT], int left, u32 lane) {
#pragma unroll
  for (int step = 0; step < PART / 64; ++step) {
    if (!WHOLE && 64 * step >= left) break;
    Words words;
    u32 b[NT][8];
    load_words(words, part + 64 * step / Q_RECORD_K * Q_RECORD_BYTES + 64 * step % Q_RECORD_K / 64 * Q_STEP_BYTES, lane);
#pragma unroll
    for (int c = 0; c < NT; ++c) load_b(b[c], x_at[c] + 128 * step), load_b(b[c] + 4, x_at[c] + 128 * step + 64);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // order-critical: K ascending
      if (!WHOLE && 64 * step + 16 * j >= left) break;
      u32 a[4];
      dequantize(words, j, table[(64 * step + 16 * j) / Q_SUB * 8 + (lane >> 2)], a);
#pragma unroll
      for (int c = 0; c < NT; ++c) mma(acc.v[c], a, b[c][2 * j], b[c][2 * j + 1]);
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
DEVICE void write(const Sums& acc, void* out, const void* bias, i64 out_ld, int row, int m, int n, u32 lane) {
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
        const float value = acc.v[c][2 * half + e];
        if (column < m) store(out, column * out_ld + r, BIAS_KIND >= 0 ? __fadd_rn(value, add) : value);
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_few(const u16* x, const u8* w, void* out, const void* bias, i64 x_ld, i64 out_ld, int m, int n, int k, int slots, int stages,
          int xstages) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x / 32 - 1;
  const u32 full_w = shared(memory), done = full_w + 8 * slots * stages, full_x = done + 8 * slots, empty_x = full_x + 8 * xstages;
  const u32 rings = (8 * (slots * (stages + 1) + 2 * xstages) + 127) & ~127, slot_bytes = stages * CHUNK_BYTES + KEPT_BYTES;
  const u32 tables = rings + slots * slot_bytes, x_stage = m * X_STEP, x_ring = shared(memory) + tables + warps * TABLE_BYTES;
  const int tiles = (n + 15) / 16, chunks = (k + CHUNK - 1) / CHUNK, stride = gridDim.x * slots, passes = (tiles + stride - 1) / stride;
  const int tile_bytes = (k + Q_RECORD_K - 1) / Q_RECORD_K * Q_RECORD_BYTES;
  if (threadIdx.x == 32 * warps) {
    for (int i = 0; i < xstages; ++i) barrier_init(full_x + 8 * i, 1), barrier_init(empty_x + 8 * i, warps);
    barrier_init_fence();
  }
  const auto load = [&](int slot, int tile, int chunk, int stage) {
    const int from = chunk * CHUNK_BYTES, bytes = min(CHUNK_BYTES, tile_bytes - from);
    const u32 bar = full_w + 8 * (slot * stages + stage);
    barrier_expect(bar, bytes);
    bulk_load(shared(memory) + rings + slot * slot_bytes + stage * CHUNK_BYTES, w + (i64)tile * tile_bytes + from, bytes, bar);
  };
  if (warp < slots && lane == 0) {
    for (int i = 0; i < stages; ++i) barrier_init(full_w + 8 * (warp * stages + i), 1);
    barrier_init_fence();
    say(done + 8 * warp, 0);
    for (int i = 0, chunk = 0, tile = warp * gridDim.x + blockIdx.x; i < stages && tile < tiles; ++i) {
      load(warp, tile, chunk, i);
      if (++chunk == chunks) chunk = 0, tile += stride;
    }
  }
  release_successor();
  __syncthreads();

  if (warp == warps) {
    wait_for_predecessor();
    const int count = HOLD ? chunks : passes * chunks;
    if (HOLD && lane == 0) barrier_expect(full_x, 2 * m * k);
    u32 phase = 1;
    for (int i = 0, at = 0, stage = 0; i < count; ++i) {
      const u32 bytes = 2 * min(CHUNK, k - at * CHUNK), bar = full_x + (HOLD ? 0 : 8 * stage);
      if (!HOLD) {
        barrier_wait(empty_x + 8 * stage, phase);
        if (lane == 0) barrier_expect(bar, m * bytes);
      }
      __syncwarp();
      if (lane < m) bulk_load(x_ring + stage * x_stage + lane * X_STEP, x + lane * x_ld + at * CHUNK, bytes, bar);
      if (++stage == xstages) stage = 0, phase ^= 1;
      if (++at == chunks) at = 0;
    }
    return;
  }

  uint4* const table = (uint4*)(memory + tables + warp * TABLE_BYTES);
  u32 x_lane[NT];
#pragma unroll
  for (int c = 0; c < NT; ++c) x_lane[c] = x_ring + min(8 * c + (int)(lane & 7), m - 1) * X_STEP + (lane >> 3) * 16;
  int stage = 0, x_at = 0, turn = 0;
  u32 phase = 0, x_phase = 0;
  int ahead_chunk = stages % chunks, ahead_first = stages / chunks * stride + blockIdx.x;
  if (HOLD) barrier_wait(full_x, 0);
  Sums acc;
  for (int time = 0, chunk = 0, first = blockIdx.x; first < passes * stride; ++time) {
    // Chosen by simulation of 16 warps on four schedulers, for 9 to 14 slots.
    const int place = ROTATE ? (warp - 7 * time) & 15 : warp, back = place - turn;
    const int slot = ROTATE ? (back < 0 ? back + slots : back) : warp, tile = first + slot * gridDim.x;
    if (!HOLD) barrier_wait(full_x + 8 * x_at, x_phase);
    if (place < slots && tile < tiles) {
      u8* const ring = memory + rings + slot * slot_bytes;
      float4* const kept = (float4*)(ring + stages * CHUNK_BYTES) + lane;
      if (ROTATE) wait_until(done + 8 * slot, time);
#pragma unroll
      for (int c = 0; c < NT; ++c) {
        float (&v)[4] = acc.v[c];
        if (chunk == 0) {
          v[0] = v[1] = v[2] = v[3] = 0.0f;
        } else if (ROTATE) {
          const float4 sums = kept[32 * c];
          v[0] = sums.x, v[1] = sums.y, v[2] = sums.z, v[3] = sums.w;
        }
      }
      const u8* at = ring + stage * CHUNK_BYTES;
      int left = k - chunk * CHUNK;
      u32 b_at[NT];
#pragma unroll
      for (int c = 0; c < NT; ++c) b_at[c] = x_lane[c] + x_at * x_stage;
      barrier_wait(full_w + 8 * (slot * stages + stage), phase);
#pragma unroll 1
      for (int part = 0; part < SPAN && left > 0; ++part) {
#pragma unroll
        for (int i = 0; i < ENTRIES / 32; ++i) {
          const int entry = i * 32 + lane;
          table[entry] = scale_of(at, entry / 8, entry % 8);
        }
        __syncwarp();
        if (left >= PART) walk<true>(acc, at, table, b_at, left, lane);
        else walk<false>(acc, at, table, b_at, left, lane);
        __syncwarp();
        left -= PART, at += PART_BYTES;
#pragma unroll
        for (int c = 0; c < NT; ++c) b_at[c] += 2 * PART;
      }
      const int next = ahead_first + slot * gridDim.x;
      if (lane == 0 && next < tiles) load(slot, next, ahead_chunk, stage);
      if (chunk + 1 == chunks) {
        write(acc, out, bias, out_ld, 16 * tile, m, n, lane);
      } else if (ROTATE) {
#pragma unroll
        for (int c = 0; c < NT; ++c) kept[32 * c] = make_float4(acc.v[c][0], acc.v[c][1], acc.v[c][2], acc.v[c][3]);
      }
      if (ROTATE) {
        __syncwarp();
        if (lane == 0) say(done + 8 * slot, time + 1);
      }
    }
    if (!HOLD && lane == 0) barrier_arrive(empty_x + 8 * x_at);
    if (++x_at == (HOLD ? chunks : xstages)) x_at = 0, x_phase ^= 1;
    if (++stage == stages) stage = 0, phase ^= 1;
    if (++turn == slots) turn = 0;
    if (++chunk == chunks) chunk = 0, first += stride;
    if (++ahead_chunk == chunks) ahead_chunk = 0, ahead_first += stride;
  }
}
