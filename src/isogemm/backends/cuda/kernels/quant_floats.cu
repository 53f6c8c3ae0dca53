// out[m, n] = sum over k of x[m, k] * w[n, k] in float32, w = (d s) q + o t: fma/chain for a few rows of x.
//
// Every operation is rounded once: w as the format's formula has it, acc = fma(x, w, acc), k ascending from 0, from +0. K is not
// padded. W is packed as quant_layout.py says: a lane has codes of K = 2 t + (0, 8, 1, 9) of two rows of each tile. A team of 4
// warps takes two tiles, and four lanes exchange words, so that each gets one row whole: lane 4 g + t row g + 8 (t % 2) of tile
// t / 2. Of a span of 256 of K warp i has the 64 from 64 i on: it dequantizes them, and then takes its turn in the chain, which
// goes from warp to warp through shared memory. The copy engine fills a team's ring of STAGES spans before x is there.
//
// Macros: those of quant_layout.macros; NX rows of x; TYPE of x (0 float32, 1 bfloat16, 2 float16); VEC: x is read four
// neighbours at a time; TEAMS of a block, STAGES.

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

// 64 of K: codes out of the records of both tiles, exchanged among four lanes, to weights of this lane's row, whose record is
// `own`. Word i of four holds K = 2 i + (0, 8, 1, 9).
DEVICE void dequantize(float (&weights)[64], const u8* record, const u8* own, int inner, u32 lane) {
  Words a, b;
  load_words(a, record + inner * Q_STEP_BYTES, lane), load_words(b, record + TILE_BYTES + inner * Q_STEP_BYTES, lane);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 w[4] = {codes(a, 2 * j), codes(a, 2 * j + 1), codes(b, 2 * j), codes(b, 2 * j + 1)};
    transpose_quad(w, lane);
    const Scale scale(own, (64 * inner + 16 * j) / Q_SUB, lane / 4 * 2 + lane % 2);
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[16 * j + i] = scale.weight(w[i % 8 / 2], i / 8 + i % 2 * 2);
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(weights[i]));  // before the turn comes
}

// Order-critical: K ascends, from k to `end` at most.
DEVICE void chain(float (&acc)[NX], const float (&weights)[64], const Rows& rows, int k, int end) {
#pragma unroll
  for (int four = 0; four < 16; ++four) {
    if (four % 4 == 0 && k + 4 * four >= end) break;
    float x[NX][4];
#pragma unroll
    for (int i = 0; i < NX; ++i) rows.load(x[i], i, k + 4 * four);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < NX; ++i) acc[i] = __fmaf_rn(x[i][j], weights[4 * four + j], acc[i]);
  }
}

extern "C" __global__ void __launch_bounds__(128 * TEAMS)
quant_floats(const void* x, const u8* w, void* out, const void* bias, i64 x_row, i64 x_column, i64 out_r, i64 out_c,
             i64 bias_stride, int m, int n, int k) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[TEAMS * STAGES];
  __shared__ float slots[TEAMS][NX][32];
  const int warp = threadIdx.x / 32, team = warp / 4, part = warp % 4, tile = 2 * (blockIdx.x * TEAMS + team);
  const int tiles = (n + 15) / 16, records = (k + Q_RECORD_K - 1) / Q_RECORD_K, spans = (k + 255) / 256, steps = (k + 63) / 64;
  const u32 lane = threadIdx.x % 32, at = team * STAGES * STAGE_BYTES, full = shared(barriers + team * STAGES);
  const u8* from = w + (i64)tile * records * Q_RECORD_BYTES;
  const auto fill = [&](int span) {
    if (span >= spans || tile >= tiles) return;
    const int s = span % STAGES, count = min(2, tiles - tile);
    const u32 bytes = min(records - span * PER, PER) * Q_RECORD_BYTES;
    barrier_expect(full + 8 * s, count * bytes);
    for (int i = 0; i < count; ++i)
      bulk_load(shared(memory) + at + s * STAGE_BYTES + i * TILE_BYTES, from + ((i64)i * records + (i64)span * PER) * Q_RECORD_BYTES, bytes, full + 8 * s);
  };
  if (lane == 0 && part == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1);
    barrier_init_fence();
    for (int s = 0; s < STAGES; ++s) fill(s);
  }
  __syncthreads();
  if (tile >= tiles) return;
  const int first = blockIdx.y * NX, own = 1 + warp, next = 1 + team * 4 + (part + 1) % 4;
  const Rows rows{(const u8*)x + (TYPE == 0 ? 4 : 2) * first * x_row, x_row, x_column, m - first};
  float acc[NX] = {};
  wait_for_predecessor();
  release_successor();  // which waits for the end of this kernel: it may prepare
#pragma unroll 1
  for (int i = part; i < steps; i += 4) {
    const int span = i / 4, s = span % STAGES;
    const u8* record = memory + at + s * STAGE_BYTES + 64 * part / Q_RECORD_K * Q_RECORD_BYTES;
    float weights[64];
    barrier_wait(full + 8 * s, span / STAGES & 1);
    dequantize(weights, record, record + lane % 4 / 2 * TILE_BYTES, part % (Q_RECORD_K / 64), lane);
    if (i > 0) {
      asm volatile("bar.sync %0, 64;" ::"r"(own) : "memory");
#pragma unroll
      for (int j = 0; j < NX; ++j) acc[j] = slots[team][j][lane];
    }
    if (part == 3 && lane == 0) fill(span + STAGES);  // the other warps have had their turns: none reads this span any more
    chain(acc, weights, rows, 64 * i, k);
    if (i + 1 < steps) {
#pragma unroll
      for (int j = 0; j < NX; ++j) slots[team][j][lane] = acc[j];
      asm volatile("bar.arrive %0, 64;" ::"r"(next) : "memory");
    }
  }
  if (steps ? (steps - 1) % 4 != part : part > 0) return;
  const Epilogue e{out, nullptr, bias, out_r, out_c, 0, 0, 0, 0, bias_stride, TYPES, 1.0f, 0.0f};
  const int column = 16 * (tile + lane % 4 / 2) + lane / 4 + 8 * (lane % 2);
#pragma unroll
  for (int i = 0; i < NX; ++i)
    if (first + i < m) e.store<1>(&acc[i], first + i, column, n);
}
