// out = epilogue(sum of leaves): LEAVES of a balanced tree, ((0 + 1) + (2 + 3)) + ..., each addition to nearest in float32;
// or, with LEAVES 0, of leaves in ascending order, from C or from +0.
//
// parts[item][leaf][m][pitch] are `leaves` sums, each a chain from +0; those that a tree lacks are +0. `pitch` is a multiple
// of W, so a thread joins W neighbours of a row; what lies beyond n is read and not stored.

#include "include/hopper_ptx.cu"
#include "include/fp32_epilogue.cu"

constexpr int W = 4, AHEAD = 8;  // loads in flight

DEVICE void load(float (&v)[W], const float* at) {
  const float4 x = *(const float4*)at;
  v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
}

DEVICE void add(float (&v)[W], const float (&x)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) v[j] = __fadd_rn(v[j], x[j]);
}

#if LEAVES
DEVICE void join(float (&sum)[W], const float* first, i64 each, int leaves) {
  float v[LEAVES][W] = {};
#pragma unroll
  for (int i = 0; i < LEAVES; ++i)
    if (i < leaves) load(v[i], first + i * each);
#pragma unroll
  for (int step = 1; step < LEAVES; step *= 2) {  // order-critical: neighbours meet, level by level
#pragma unroll
    for (int i = 0; i < LEAVES; i += 2 * step) add(v[i], v[i + step]);
  }
#pragma unroll
  for (int j = 0; j < W; ++j) sum[j] = v[0][j];
}
#else
DEVICE void join(float (&sum)[W], const float* first, i64 each, int leaves) {
  for (int begin = 0; begin < leaves; begin += AHEAD) {  // order-critical: ascending
    float v[AHEAD][W];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (begin + i < leaves) load(v[i], first + (begin + i) * each);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (begin + i < leaves) add(sum, v[i]);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(256)
meet(const float* parts, void* out, const void* c, const void* bias, i64 out_r, i64 out_c, i64 out_batch, i64 c_r, i64 c_c,
     i64 c_batch, i64 bias_stride, int m, int n, int items, int pitch, int leaves, float alpha, float beta) {
  wait_for_predecessor();
  const int across = pitch / W;
  const i64 each = (i64)m * pitch, count = (i64)items * m * across;
  for (i64 x = blockIdx.x * 256ll + threadIdx.x; x < count; x += gridDim.x * 256ll) {
    const i64 line = x / across, item = line / m;
    const int row = (int)(line - item * m), col = (int)(x - line * across) * W;
    const Epilogue e{out, c, bias, out_r, out_c, item * out_batch, c_r, c_c, item * c_batch, bias_stride, alpha, beta};
    float sum[W] = {};
    if (!LEAVES && e.starts()) {
#pragma unroll
      for (int j = 0; j < W; ++j)
        if (col + j < n) sum[j] = e.start(row, col + j);
    }
    join(sum, parts + item * leaves * each + (i64)row * pitch + col, each, leaves);
    e.store<W>(sum, row, col, n);
  }
  release_successor();
}
