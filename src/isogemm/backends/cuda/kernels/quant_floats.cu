// out[m, n] = sum over k of x[m, k] * w[n, k] in float32, w = (d s) q + o t: fma/chain for a few rows of x.
//
// Every operation is rounded once: w as the format's formula has it, acc = fma(x, w, acc), k ascending from 0, from +0. K is not
// padded. W is packed as quant_layout.py says: a lane has codes of K = 2 t + (0, 8, 1, 9) of two rows of each tile. A warp takes
// two tiles, and four lanes exchange words, so that each gets one row whole: lane 4 g + t row g + 8 (t % 2) of tile t / 2. The
// copy engine fills a ring of STAGES spans of 256 of K for each warp before x is there.
//
// Macros: those of quant_layout.macros; NX rows of x; TYPE of x (0 float32, 1 bfloat16, 2 float16); VEC: x is read four
// neighbours at a time; WARPS, STAGES.

#include "hopper_ptx.cu"
#include "fp32_epilogue.cu"
#include "quant_codes.cu"

constexpr int PER = 256 / Q_RECORD_K, TILE_BYTES = PER * Q_RECORD_BYTES, STAGE_BYTES = 2 * TILE_BYTES;

DEVICE void bulk_load(u32 to, const u8* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar) : "memory");
}

struct Rows {
  const void* x;
  i64 row, column;
  int m;
  // Four neighbours of a row; rows past m repeat the last one.
  __device__ __forceinline__ void load(float (&v)[4], int i, int k) const {
    const i64 at = min(i, m - 1) * row + k * column;
    if (VEC && TYPE == 0) {
      const float4 a = *(const float4*)((const float*)x + at);
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    } else if (VEC) {
      const uint2 a = *(const uint2*)((const u16*)x + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = widened((u16)((j < 2 ? a.x : a.y) >> 16 * (j & 1)));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        v[j] = TYPE == 0 ? ((const float*)x)[at + j * column] : widened(((const u16*)x)[at + j * column]);
    }
  }
  static __device__ __forceinline__ float widened(u16 h) { return TYPE == 1 ? __uint_as_float((u32)h << 16) : f16_to_float(h); }
};

// d s and o t of a row of a tile.
struct Scale {
  float s, t;
  __device__ __forceinline__ Scale(const u8* record, int sub, u32 slot) {
    const u16* floats = (const u16*)(record + Q_FLOATS) + (sub * Q_SUB / Q_BLOCK * 16 + slot) * Q_FLOATS_EACH;
    s = f16_to_float(floats[0]), t = Q_FLOATS_EACH == 2 ? f16_to_float(floats[Q_FLOATS_EACH - 1]) : 0.0f;
    if (Q_INTS_EACH == 0) return;
    const u8* ints = record + Q_INTS + (sub * 16 + slot) * Q_INTS_EACH;
    const int first = Q_SIGNED ? (int)*(const signed char*)ints : Q_JOINT ? *ints & 15 : *ints;
    s = __fmul_rn(s, (float)first);
    if (Q_FLOATS_EACH == 2) t = __fmul_rn(t, (float)(Q_JOINT ? *ints >> 4 : ints[Q_INTS_EACH == 2]));
  }
  // With the code in a byte of `four`. Where there is no o, a weight of zero has the sign that the product gives it.
  __device__ __forceinline__ float weight(u32 four, int byte) const {
    const float q = __fsub_rn(__uint_as_float(__byte_perm(four, 0x4b000000u, 0x7440 + byte)), 8388608.0f + Q_ZERO);
    return Q_FLOATS_EACH == 2 ? __fmaf_rn(q, s, t) : __fmul_rn(q, s);
  }
};

// 16 of K from k on: word i of `w` holds K = 2 i + (0, 8, 1, 9) of this lane's row. Order-critical: K ascends.
DEVICE void sixteen(float (&acc)[NX], const u32 (&w)[4], const Scale& scale, const Rows& rows, int k) {
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    float x[NX][4];
#pragma unroll
    for (int i = 0; i < NX; ++i) rows.load(x[i], i, k + 4 * four);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = 4 * four + j;
      const float weight = scale.weight(w[at % 8 / 2], at / 8 + at % 2 * 2);
#pragma unroll
      for (int i = 0; i < NX; ++i) acc[i] = __fmaf_rn(x[i][j], weight, acc[i]);
    }
  }
}

// 64 of K: their codes out of the records of both tiles, exchanged among four lanes. `own` is the record of this lane's row.
DEVICE void step(float (&acc)[NX], const u8* record, const u8* own, int inner, u32 lane, const Rows& rows, int k, int end) {
  Words a, b;
  load_words(a, record + inner * Q_STEP_BYTES, lane), load_words(b, record + TILE_BYTES + inner * Q_STEP_BYTES, lane);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (k + 16 * j >= end) break;
    u32 w[4] = {codes(a, 2 * j), codes(a, 2 * j + 1), codes(b, 2 * j), codes(b, 2 * j + 1)};
    transpose_quad(w, lane);
    const Scale scale(own, (64 * inner + 16 * j) / Q_SUB, lane / 4 * 2 + lane % 2);
    sixteen(acc, w, scale, rows, k + 16 * j);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
quant_floats(const void* x, const u8* w, void* out, const void* bias, i64 x_row, i64 x_column, i64 out_r, i64 out_c,
             i64 bias_stride, int m, int n, int k) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[WARPS * STAGES];
  const int warp = threadIdx.x / 32, tile = 2 * (blockIdx.x * WARPS + warp), spans = (k + 255) / 256;
  const int tiles = (n + 15) / 16, records = (k + Q_RECORD_K - 1) / Q_RECORD_K;
  const u32 lane = threadIdx.x % 32, ring = shared(memory) + warp * STAGES * STAGE_BYTES, full = shared(barriers + warp * STAGES);
  if (tile >= tiles) return;
  const u8* from = w + (i64)tile * records * Q_RECORD_BYTES;
  const auto fill = [&](int span) {
    if (span >= spans) return;
    const int s = span % STAGES, count = min(2, tiles - tile);
    const u32 bytes = min(records - span * PER, PER) * Q_RECORD_BYTES;
    barrier_expect(full + 8 * s, count * bytes);
    for (int i = 0; i < count; ++i)
      bulk_load(ring + s * STAGE_BYTES + i * TILE_BYTES, from + ((i64)i * records + (i64)span * PER) * Q_RECORD_BYTES, bytes, full + 8 * s);
  };
  if (lane == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1);
    barrier_init_fence();
    for (int s = 0; s < STAGES; ++s) fill(s);
  }
  __syncwarp();
  const int first = blockIdx.y * NX;
  const Rows rows{(const u8*)x + (TYPE == 0 ? 4 : 2) * first * x_row, x_row, x_column, m - first};
  float acc[NX] = {};
  wait_for_predecessor();
  for (int span = 0; span < spans; ++span) {
    const int s = span % STAGES, steps = min(4, (k + 63) / 64 - 4 * span);
    const u8* stage = memory + (warp * STAGES + s) * STAGE_BYTES;
    barrier_wait(full + 8 * s, span / STAGES & 1);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const u8* record = stage + 64 * i / Q_RECORD_K * Q_RECORD_BYTES;
      step(acc, record, record + lane % 4 / 2 * TILE_BYTES, i % (Q_RECORD_K / 64), lane, rows, 256 * span + 64 * i, k);
    }
    __syncwarp();
    if (lane == 0) fill(span + STAGES);
  }
  release_successor();
  const Epilogue e{out, nullptr, bias, out_r, out_c, 0, 0, 0, 0, bias_stride, TYPES, 1.0f, 0.0f};
  const int column = 16 * (tile + lane % 4 / 2) + lane / 4 + 8 * (lane % 2);
#pragma unroll
  for (int i = 0; i < NX; ++i)
    if (first + i < m) e.store<1>(&acc[i], first + i, column, n);
}
