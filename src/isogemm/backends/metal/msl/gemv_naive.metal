// One thread walks all of K for one output, ascending. Threads: 64 columns of a row. Contract: fma/chain.
kernel void gemv_naive(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]],
                       device uint* y [[buffer(2)]], device const uint* shape [[buffer(3)]],
                       uint3 group [[threadgroup_position_in_grid]], uint local [[thread_index_in_threadgroup]]) {
  uint n = shape[1], k = shape[2], i = group.y, j = group.x * 64 + local;
  if (j >= n) {
    return;
  }
  float acc = 0;
  for (uint p = 0; p < k; p++) {
    acc = fma(float(x[i * k + p]), float(w[j * k + p]), acc);
  }
  y[i * n + j] = canonical(acc);
}
