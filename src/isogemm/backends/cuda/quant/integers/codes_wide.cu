// Rows of activations to 8-bit codes that float16 holds, for quant/integers/wide.cu. Steps: quant/integers/code_steps.cu.
//
// Macros of quant/integers/code_steps.cu; SUB is 16 with SUMS 4. Where results lie, `rows` being m rounded up to 16:
//     codes   [m][k] float16
//     scales  [block][rows] float32; with SUMS 2 two lines to a block, the second the sum times the scale: 12 bits times
//             11, exact. Of 16 rows a lane t of four finds its own together: 2 t, 2 t + 1, 2 t + 8, 2 t + 9
//     sums    [m][k / 16] float16, with SUMS 4: up to 16 * 127, exact

#include "include/elements.cu"
#include "quant/integers/code_steps.cu"

extern "C" __global__ void __launch_bounds__(128)
quant_activations_wide(const void* x, i64 x_row, i64 x_column, u8* codes, float* scales, u16* sums, int m, int k) {
  const int lane = threadIdx.x % 32, spans = (k + 255) / 256;
  const i64 job = (i64)blockIdx.x * 4 + threadIdx.x / 32;
  wait_for_predecessor();
  release_successor();
  if (job >= (i64)m * spans) return;
  const int row = (int)(job / spans), first = (int)(job % spans) * 256 + 8 * lane, rows = (m + 15) / 16 * 16;
  const bool in = first < k;
  float v[8];
  const Scale s = load_scaled(v, x, row * x_row, x_column, first, k);
  int sum = 0;
  u32 words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int a = code_of(v[2 * j], s), b = code_of(v[2 * j + 1], s);
    sum += a + b, words[j] = pack_f16((float)a, (float)b);
  }
  if (SUMS) sum = summed(sum);
  if (!in) return;
  *(uint4*)(codes + 2 * ((i64)row * k + first)) = make_uint4(words[0], words[1], words[2], words[3]);
  if (lane % (BLOCK / 8) == 0) {
    const int place = row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
    float* to = scales + (i64)(first / BLOCK) * (SUMS == 2 ? 2 : 1) * rows + place;
    to[0] = s.scale;
    if (SUMS == 2) to[rows] = __fmul_rn((float)sum, s.scale);
  }
  if (SUMS == 4 && lane % 2 == 0) sums[((i64)row * k + first) / 16] = narrow<2>((float)sum);
}
