// 32 x 32 outputs by 256 threads, 4 of a row to each; 16 of K at a time through threadgroup memory, which all threads
// fill: 512 elements of either side. A tail of K is left out, not filled with zeros. Contract: fma/chain.
kernel void gemm_tiled(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]],
                       device uint* y [[buffer(2)]], device const uint* shape [[buffer(3)]],
                       uint3 group [[threadgroup_position_in_grid]], uint local [[thread_index_in_threadgroup]]) {
  threadgroup float left[512], right[512];
  uint m = shape[0], n = shape[1], k = shape[2], i = group.y * 32, j = group.x * 32;
  uint row = local / 8, column = local % 8 * 4;
  float acc[4] = {0, 0, 0, 0};
  for (uint p = 0; p < k; p += 16) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = local; e < 512; e += 256) {
      uint at = p + e % 16;
      left[e] = i + e / 16 < m && at < k ? float(x[(i + e / 16) * k + at]) : 0;
      right[e] = j + e / 16 < n && at < k ? float(w[(j + e / 16) * k + at]) : 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint step = 0; step < min(16u, k - p); step++) {
      for (uint c = 0; c < 4; c++) {
        acc[c] = fma(left[row * 16 + step], right[(column + c) * 16 + step], acc[c]);
      }
    }
  }
  for (uint c = 0; c < 4; c++) {
    if (i + row < m && j + column + c < n) {
      y[(i + row) * n + j + column + c] = canonical(acc[c]);
    }
  }
}
