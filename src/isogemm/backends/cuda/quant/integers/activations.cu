// Rows of activations to 8-bit codes, in memory: see quant/integers/code_steps.cu. Rows beyond m are not written.
//
// `each` rows make a part, whose codes, scales and sums lie as if there were no others; parts are `part_bytes` apart.
// Its successor may start at once: before it waits it reads weights alone, and this kernel ends after its predecessor.

#include "include/elements.cu"
#include "quant/integers/code_steps.cu"

extern "C" __global__ void __launch_bounds__(128)
quant_activations(const void* x, i64 x_row, i64 x_column, u8* codes, float* scales, int* sums, int m, int k, int each,
                  i64 part_bytes) {
  const int lane = threadIdx.x % 32, spans = (k + 255) / 256;
  const i64 job = (i64)blockIdx.x * 4 + threadIdx.x / 32;
  release_successor();
  wait_for_predecessor();
  if (job >= (i64)m * spans) return;
  const int row = (int)(job / spans), first = (int)(job % spans) * 256 + 8 * lane, tiles = (each + 7) / 8, in = row % each;
  const i64 part = row / each * part_bytes;
  u8* tile = codes + part + in / 8 * 512;
  quantize(x, row * x_row, x_column, first, k, tile, 512ll * tiles, in % 8, (float*)((u8*)scales + part),
           (int*)((u8*)sums + part), in, 8 * tiles, lane);
}
