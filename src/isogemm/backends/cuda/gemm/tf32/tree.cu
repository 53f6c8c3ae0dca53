// out = epilogue(balanced tree over LEAVES sums): ((0 + 1) + (2 + 3)) + ..., each addition to nearest in float32.
//
// parts[item][leaf][m][n] are the leaves, each a chain from +0. A thread joins one element.

#include "include/hopper_ptx.cu"
#include "include/fp32_epilogue.cu"

extern "C" __global__ void __launch_bounds__(256)
tree(const float* parts, void* out, const void* c, const void* bias, i64 out_r, i64 out_c, i64 out_batch, i64 c_r, i64 c_c,
     i64 c_batch, i64 bias_stride, int m, int n, int items, int types, float alpha, float beta) {
  wait_for_predecessor();
  const i64 each = (i64)m * n;
  for (i64 x = blockIdx.x * 256ll + threadIdx.x; x < items * each; x += gridDim.x * 256ll) {
    const i64 item = x / each, at = x % each;
    float v[LEAVES];
#pragma unroll
    for (int i = 0; i < LEAVES; ++i) v[i] = parts[(item * LEAVES + i) * each + at];
#pragma unroll
    for (int step = 1; step < LEAVES; step *= 2) {  // order-critical: neighbours meet, level by level
#pragma unroll
      for (int i = 0; i < LEAVES; i += 2 * step) v[i] = __fadd_rn(v[i], v[i + step]);
    }
    const Epilogue e{out, c, bias, out_r, out_c, item * out_batch, c_r, c_c, item * c_batch, bias_stride, types, alpha, beta};
    e.store<1>(v, (int)(at / n), (int)(at % n), n);
  }
  release_successor();
}
