// out[n, k] = W[n, k]: weights packed as quant/layout.py says, as bf16, fp16 or float32 rows, with all bits of the formula.
//
// A warp takes 16 rows and 64 of K at a time; where numbers have 2 bytes, the lanes of a quad trade words so that each stores
// 16 bytes of a row at once. (d s) q has the sign of its factors where it is zero, so the zero point comes off first here.

#include "include/elements.cu"
#define KIND OUT
#include "quant/codes.cu"
#undef KIND

// Where a lane's weights of row g + 8 half are: value[half][2 * j + high][odd] has K = 16 j + 8 high + 2 t + odd.
DEVICE void values(float (&v)[2][8][2], const u8* record, u32 step, u32 lane) {
  Words w;
  load_words(w, record + step * Q_STEP_BYTES, lane);
  uint4 s;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j * 16 % Q_SUB == 0) s = scale_of_floats(record, step * (64 / Q_SUB) + j * 16 / Q_SUB, lane >> 2);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int half = r % 2, high = r / 2, field = 2 * j + half, at = in_place(field);
      const float d = __uint_as_float(half ? s.z : s.x), c = __uint_as_float(half ? s.w : s.y);
      float x[2];
      widen(pair(w, field, high, at, 0), x[0], x[1]);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        v[half][2 * j + high][odd] = Q_FLOATS_EACH == 2 ? __fmaf_rn(x[odd], d, c)
                                                        : __fmul_rn(x[odd] - Q_ZERO * __uint_as_float((103 + at) << 23), d);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) quant_dequantize(const u8* w, u8* out, i64 out_ld, i64 tile_bytes, int first, int rows, int k) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int steps = (k + 63) / 64, tiles = (rows + 15) / 16;
  wait_for_predecessor();
  release_successor();  // it waits for this kernel's end before it reads what is written here
  for (i64 i = (i64)blockIdx.x * 8 + warp; i < (i64)tiles * steps; i += (i64)gridDim.x * 8) {
    const int tile = i / steps, step = i % steps;
    float v[2][8][2];
    values(v, w + (first / 16 + tile) * tile_bytes + (i64)(step / (Q_RECORD_K / 64)) * Q_RECORD_BYTES, step % (Q_RECORD_K / 64), lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * tile + 8 * half + (lane >> 2);
      u8* line = out + (OUT == 0 ? 4 : 2) * (row * out_ld + 64 * step);
      const int left = k - 64 * step;
#pragma unroll
      for (int chunk = 0; chunk < 8; chunk += 4) {
        u32 word[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float x = v[half][chunk + c][0], y = v[half][chunk + c][1];
          if (OUT != 0) word[c] = narrow<OUT>(x, y);
          else if (row < rows && 8 * (chunk + c) < left) *(float2*)(line + 4 * (8 * (chunk + c) + 2 * (lane & 3))) = make_float2(x, y);
        }
        if (OUT == 0) continue;
        transpose_quad(word, lane);
        const int at = 8 * (chunk + (lane & 3));
        if (row < rows && at < left) *(uint4*)(line + 2 * at) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}
