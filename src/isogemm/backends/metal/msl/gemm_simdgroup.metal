// 8 x 8 outputs by a SIMD group's matrix unit, accumulated in float, 8 of K at a time; what is left of K is added one by
// one, as zeros would make +0 of a sum that is -0. The result goes through threadgroup memory, whose 64 elements 32 threads
// write, two each. In which order a unit adds 8 products Apple does not say, so the contract fma/chain is what a trial may
// admit and no promise.
kernel void gemm_simdgroup(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]],
                           device uint* y [[buffer(2)]], device const uint* shape [[buffer(3)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint local [[thread_index_in_threadgroup]]) {
  threadgroup float left[64], right[64], result[64];
  uint m = shape[0], n = shape[1], k = shape[2], i = group.y * 8, j = group.x * 8;
  simdgroup_float8x8 acc = make_filled_simdgroup_matrix<float, 8, 8>(0);
  for (uint p = 0; p < k / 8 * 8; p += 8) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = local; e < 64; e += 32) {
      uint at = p + e % 8;
      left[e] = i + e / 8 < m ? float(x[(i + e / 8) * k + at]) : 0;
      right[e % 8 * 8 + e / 8] = j + e / 8 < n ? float(w[(j + e / 8) * k + at]) : 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 a, b;
    simdgroup_load(a, left, 8);
    simdgroup_load(b, right, 8);
    simdgroup_multiply_accumulate(acc, a, b, acc);
  }
  simdgroup_store(acc, result, 8);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = local; e < 64; e += 32) {
    if (i + e / 8 < m && j + e % 8 < n) {
      float sum = result[e];
      for (uint at = k / 8 * 8; at < k; at++) {
        sum = fma(float(x[(i + e / 8) * k + at]), float(w[(j + e % 8) * k + at]), sum);
      }
      y[(i + e / 8) * n + j + e % 8] = canonical(sum);
    }
  }
}
