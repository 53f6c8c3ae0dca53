// out[n, k] = W[n, k]: weights packed as quant/layout.py says, as bf16, fp16 or float32 rows, with all bits of the formula.
//
// A warp has 16 rows and 64 of K. It leaves them in shared memory, in rows of 128 bytes as the map's swizzle has them, and
// the copy engine brings them away, up to the last row and column that there are. Weights do not change, so they are read
// before the launch before this one has ended, which may still read what is written here.
// (d s) q has the sign of its factors where it is zero, so the zero point comes off first here.

#include "include/elements.cu"
#define KIND OUT
#include "quant/codes.cu"
#undef KIND

constexpr int BOXES = OUT ? 1 : 2, BOX_K = 64 / BOXES, BOX_BYTES = 16 * 128, STEPS = Q_RECORD_K / 64;

DEVICE void tma_store(const Map* map, u32 from, int k, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(map), "r"(from), "r"(k), "r"(row) : "memory");
}
// Until what this thread has stored has been read.
DEVICE void tma_stored() { asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Row g + 8 half, K = 16 j + 8 high + 2 t + odd.
DEVICE void weights(float (&x)[2], const Words& w, const uint4& s, int j, int half, int high) {
  const int field = 2 * j + half, at = in_place(field);
  const float d = __uint_as_float(half ? s.z : s.x), c = __uint_as_float(half ? s.w : s.y);
  widen(pair(w, field, high, at, 0), x[0], x[1]);
#pragma unroll
  for (int odd = 0; odd < 2; ++odd)
    x[odd] = Q_FLOATS_EACH == 2 ? __fmaf_rn(x[odd], d, c)
                                : __fmul_rn(x[odd] - Q_ZERO * __uint_as_float((103 + at) << 23), d);
}

extern "C" __global__ void __launch_bounds__(128)
quant_dequantize(const __grid_constant__ Map out, const u8* w, i64 tile_bytes, int first, int k, u32 across) {
  extern __shared__ u8 dynamic[];
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, row = lane & 15;
  const int tile = blockIdx.x / across, step = blockIdx.x % across * (blockDim.x >> 5) + warp, of_record = step % STEPS;
  release_successor();  // it waits for this kernel's end before it reads what is written here
  if (64 * step >= k) return;
  const u8* record = w + (first / 16 + tile) * tile_bytes + (i64)(step / STEPS) * Q_RECORD_BYTES;
  Words words;
  load_words(words, record + of_record * Q_STEP_BYTES, lane);
  const u32 memory = (shared(dynamic) + 1023 & ~1023u) + warp * BOXES * BOX_BYTES;
  uint4 s;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j * 16 % Q_SUB == 0) s = scale_of_floats(record, of_record * (64 / Q_SUB) + j * 16 / Q_SUB, g);
    u32 a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int half = r % 2, high = r / 2;
      float x[2];
      weights(x, words, s, j, half, high);
      if (OUT) {
        a[r] = narrow<OUT>(x[0], x[1]);
      } else {
        const u32 chunk = j % 2 * 4 + high * 2 + (lane >> 1 & 1), at = memory + j / 2 * BOX_BYTES + (g + 8 * half) * 128;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                     ::"r"(at + ((chunk ^ g) << 4) + (lane & 1) * 8), "f"(x[0]), "f"(x[1]) : "memory");
      }
    }
    if (OUT) store_matrices(memory + row * 128 + ((2 * j + (lane >> 4) ^ row & 7) << 4), a);
  }
  fence_async_proxy();
  __syncwarp();
  wait_for_predecessor();
  if (elected()) {
#pragma unroll
    for (int i = 0; i < BOXES; ++i) tma_store(&out, memory + i * BOX_BYTES, 64 * step + i * BOX_K, 16 * tile);
    tma_stored();
  }
}
