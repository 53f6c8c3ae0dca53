// out[m, n] = sum over k of x[m, k] * w[n, k] in float32, w = (d s) q + o t: fma/chain for a few rows of x.
//
// Every operation is rounded once: w as the format's formula has it, acc = fma(x, w, acc), k ascending from 0, from +0. K is not
// padded. W is packed as quant/layout.py says: four lanes have codes of K = 2 t + (0, 8, 1, 9) of two rows of a tile. A warp takes
// two tiles, and lane 4 g + t one row whole, g + 8 (t % 2) of tile t / 2: it reads what is laid out for four lanes. The copy
// engine fills a ring of STAGES spans of 256 of K for each warp before x is there.
//
// Macros: those of layout.macros; NX rows of x; TYPE of x (0 float32, 1 bfloat16, 2 float16); VEC: x is read four
// neighbours at a time; WARPS, STAGES.

#include "include/elements.cu"
#include "include/fp32_epilogue.cu"
#include "quant/codes.cu"

constexpr int PER = 256 / Q_RECORD_K, TILE_BYTES = PER * Q_RECORD_BYTES, STAGE_BYTES = 2 * TILE_BYTES;

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
      for (int j = 0; j < 4; ++j) v[j] = widen<TYPE>((u16)((j < 2 ? a.x : a.y) >> 16 * (j & 1)));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = load_as<TYPE>(x, at + j * column);
    }
  }
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

// A span of x: of each row, what a lane brings, and where all lanes read it.
struct Span {
  float v[NX][8];
  __device__ __forceinline__ void load(const Rows& rows, int k, int end, u32 lane) {
#pragma unroll
    for (int i = 0; i < NX; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = k + 128 * half + 4 * lane;
        float four[4] = {};
        if (at < end) rows.load(four, i, at);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][4 * half + j] = four[j];
      }
  }
  __device__ __forceinline__ void store(float4* x, u32 lane) const {
#pragma unroll
    for (int i = 0; i < NX; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[64 * i + 32 * half + lane] = make_float4(v[i][4 * half], v[i][4 * half + 1], v[i][4 * half + 2], v[i][4 * half + 3]);
  }
};

// 16 of K: word i of `w` holds K = 2 i + (0, 8, 1, 9) of this lane's row; `x` are its numbers. Order-critical: K ascends.
DEVICE void sixteen(float (&acc)[NX], const u32 (&w)[4], const Scale& scale, const float4* x) {
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    float v[NX][4];
#pragma unroll
    for (int i = 0; i < NX; ++i) {
      const float4 a = x[64 * i + four];
      v[i][0] = a.x, v[i][1] = a.y, v[i][2] = a.z, v[i][3] = a.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = 4 * four + j;
      const float weight = scale.weight(w[at % 8 / 2], at / 8 + at % 2 * 2);
#pragma unroll
      for (int i = 0; i < NX; ++i) acc[i] = __fmaf_rn(v[i][j], weight, acc[i]);
    }
  }
}

// Four codes of row g + 8 half as bytes, as `codes` has them.
DEVICE u32 codes_of(const Words& w, int j, int half) {
  const int f = 2 * j;
  if constexpr (LOW_FIELDS == 1) return half ? w.low[f + 1] : w.low[f];
  u32 x = w.low[f / LOW_FIELDS] >> Q_LOW * (f % LOW_FIELDS) + Q_LOW * half & LOW_MASK * 0x1010101u;
  if constexpr (Q_HIGH > 0)
    x |= (w.high[f / HIGH_FIELDS] >> Q_HIGH * (f % HIGH_FIELDS) + Q_HIGH * half & HIGH_MASK * 0x1010101u) << Q_LOW;
  return x;
}
// The words of four lanes, which are neighbours.
DEVICE void load_four(Words (&w)[4], const u8* step, u32 g) {
#pragma unroll
  for (int i = 0; i < Q_LOW + Q_HIGH; ++i) {
    const uint4 x = *(const uint4*)(step + 128 * i + 16 * g);
    const u32 each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int t = 0; t < 4; ++t) (i < Q_LOW ? w[t].low[i < Q_LOW ? i : 0] : w[t].high[i < Q_LOW ? 0 : i - Q_LOW]) = each[t];
  }
}
// Up to 64 of K of this lane's row, in `record`.
DEVICE void step(float (&acc)[NX], const u8* record, int inner, u32 lane, const float4* x, int left) {
  Words words[4];
  load_four(words, record + inner * Q_STEP_BYTES, lane / 4);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (16 * j >= left) break;
    u32 w[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) w[t] = codes_of(words[t], j, lane % 2);
    const Scale scale(record, (64 * inner + 16 * j) / Q_SUB, lane / 4 * 2 + lane % 2);
    sixteen(acc, w, scale, x + 4 * j);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
quant_floats(const void* x, const u8* w, void* out, const void* bias, i64 x_row, i64 x_column, i64 out_r, i64 out_c,
             i64 bias_stride, int m, int n, int k) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ alignas(8) u64 barriers[WARPS * STAGES];
  __shared__ float4 spans_of_x[WARPS][NX * 64];
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
  float4* const x_here = spans_of_x[warp];
  Span next;
  wait_for_predecessor();
  next.load(rows, 0, k, lane);
  for (int span = 0; span < spans; ++span) {
    const int s = span % STAGES, steps = min(4, (k + 63) / 64 - 4 * span);
    const u8* stage = memory + (warp * STAGES + s) * STAGE_BYTES;
    next.store(x_here, lane);
    __syncwarp();
    next.load(rows, 256 * (span + 1), k, lane);
    barrier_wait(full + 8 * s, span / STAGES & 1);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const u8* record = stage + lane % 4 / 2 * TILE_BYTES + 64 * i / Q_RECORD_K * Q_RECORD_BYTES;
      step(acc, record, i % (Q_RECORD_K / 64), lane, x_here + 16 * i, k - 256 * span - 64 * i);
    }
    __syncwarp();
    if (lane == 0) fill(span + STAGES);
  }
  release_successor();
  const Epilogue e{out, nullptr, bias, out_r, out_c, 0, 0, 0, 0, bias_stride, 1.0f, 0.0f};
  const int column = 16 * (tile + lane % 4 / 2) + lane / 4 + 8 * (lane % 2);
#pragma unroll
  for (int i = 0; i < NX; ++i)
    if (first + i < m) e.store<1>(&acc[i], first + i, column, n);
}
