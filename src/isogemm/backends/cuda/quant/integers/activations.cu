// Rows of activations to 8-bit codes, in memory: see quant/integers/code_steps.cu. Rows beyond m are not written.
//
// Its successor may start at once: before it waits it reads weights alone, and this kernel ends after its predecessor.

#include "include/elements.cu"
#include "quant/integers/code_steps.cu"

extern "C" __global__ void __launch_bounds__(128)
quant_activations(const void* x, i64 x_row, i64 x_column, u8* codes, float* scales, int* sums, int m, int k) {
  const int lane = threadIdx.x % 32, spans = (k + 255) / 256;
  const i64 job = (i64)blockIdx.x * 4 + threadIdx.x / 32;
  release_successor();
  wait_for_predecessor();
  if (job >= (i64)m * spans) return;
  const int row = (int)(job / spans), first = (int)(job % spans) * 256 + 8 * lane, tiles = (m + 7) / 8;
  u8* tile = codes + row / 8 * 512;
  quantize(x, row * x_row, x_column, first, k, tile, 512ll * tiles, row % 8, scales, sums, row, 8 * tiles, lane);
}
