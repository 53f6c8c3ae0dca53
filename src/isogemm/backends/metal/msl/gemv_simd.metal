// A SIMD group walks K for one output: lane l has k = l, l + 32, ... Threads: 4 groups of 32. Contract: fma/lanes32.
kernel void gemv_simd(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]],
                      device uint* y [[buffer(2)]], device const uint* shape [[buffer(3)]],
                      uint3 group [[threadgroup_position_in_grid]], uint local [[thread_index_in_threadgroup]]) {
  uint n = shape[1], k = shape[2], i = group.y, j = group.x * 4 + local / 32, lane = local % 32;
  float sum = 0;
  if (j < n) {
    for (uint p = lane; p < k; p += 32) {
      sum = fma(float(x[i * k + p]), float(w[j * k + p]), sum);
    }
  }
  sum = meet(sum);
  if (lane == 0 && j < n) {
    y[i * n + j] = canonical(sum);
  }
}
