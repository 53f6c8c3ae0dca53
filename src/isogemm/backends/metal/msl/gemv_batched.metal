// As gemv_simd, with up to 8 rows of x to a SIMD group; further rows belong to further threadgroups.
// Threads: 2 groups of 32. Contract: fma/lanes32.
kernel void gemv_batched(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]],
                         device uint* y [[buffer(2)]], device const uint* shape [[buffer(3)]],
                         uint3 group [[threadgroup_position_in_grid]], uint local [[thread_index_in_threadgroup]]) {
  uint m = shape[0], n = shape[1], k = shape[2];
  uint i = group.y * 8, j = group.x * 2 + local / 32, lane = local % 32, count = min(8u, m - i);
  float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (j < n) {
    for (uint p = lane; p < k; p += 32) {
      float weight = float(w[j * k + p]);
      for (uint r = 0; r < count; r++) {
        sums[r] = fma(float(x[(i + r) * k + p]), weight, sums[r]);
      }
    }
  }
  for (uint r = 0; r < 8; r++) {
    float sum = meet(sums[r]);
    if (lane == 0 && j < n && r < count) {
      y[(i + r) * n + j] = canonical(sum);
    }
  }
}
