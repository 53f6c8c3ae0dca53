// The steps between the products of attention's gradients, one pass over the scores, each product and sum rounded by itself.
//
//   t = s * c, + added, -inf where hidden;  p = exp2(t - u) * r;  ds = p * (dp - delta)
//
// s, dp      [items, rows, keys] of float32, contiguous; hidden (bytes) and added (float32) by strides over the same
// m, l, delta  [items, rows] of float32, contiguous; u = m or 0 where that is -inf, r = 1 / l or 0 where l is 0
// p, ds      as s, of OUT; either may be null. A block owns 4 * THREADS keys of a row.
#include "attention/common.cu"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward(const float* s, const float* dp, const float* m, const float* l, const float* delta,
                   const unsigned char* hidden, const float* added, void* p, void* ds, i64 hidden_b, i64 hidden_r,
                   i64 hidden_k, i64 added_b, i64 added_r, i64 added_k, int rows, int keys, float c) {
  wait_for_predecessor();
  release_successor();
  const i64 line = blockIdx.x, item = line / rows, row = line % rows, at = line * keys;
  const float u = finite(m[line]), total = l[line], over = total == 0.0f ? 0.0f : __fdiv_rn(1.0f, total);
  const float less = dp ? delta[line] : 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = (blockIdx.y * 4 + i) * THREADS + threadIdx.x;
    if (key >= keys) break;
    float t = __fmul_rn(s[at + key], c);
    if (added) t = __fadd_rn(t, added[item * added_b + row * added_r + key * added_k]);
    if (hidden && hidden[item * hidden_b + row * hidden_r + key * hidden_k]) t = NONE;
    const float x = __fmul_rn(exp2_of<true>(__fsub_rn(t, u)), over);
    if (p) put<OUT>(p, at + key, x);
    if (ds) put<OUT>(ds, at + key, __fmul_rn(__fsub_rn(dp[at + key], less), x));
  }
}
