// As gemv_simd, with 4 columns to a SIMD group, of which the last has fewer where 4 does not divide N.
// Threads: 2 groups of 32. Contract: fma/lanes32.
kernel void gemv_simd_multi(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]],
                            device uint* y [[buffer(2)]], device const uint* shape [[buffer(3)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint local [[thread_index_in_threadgroup]]) {
  uint n = shape[1], k = shape[2], i = group.y, j = (group.x * 2 + local / 32) * 4, lane = local % 32;
  uint count = j < n ? min(4u, n - j) : 0;
  float sums[4] = {0, 0, 0, 0};
  for (uint p = lane; p < k; p += 32) {
    float value = float(x[i * k + p]);
    for (uint c = 0; c < count; c++) {
      sums[c] = fma(value, float(w[(j + c) * k + p]), sums[c]);
    }
  }
  for (uint c = 0; c < 4; c++) {
    float sum = meet(sums[c]);
    if (lane == 0 && c < count) {
      y[i * n + j + c] = canonical(sum);
    }
  }
}
