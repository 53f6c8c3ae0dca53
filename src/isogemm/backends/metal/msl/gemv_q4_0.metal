// Q4_0 weights (18 bytes: a half d, then 16 bytes whose low nibbles are elements 0 to 15) and activations in blocks of
// 32 signed bytes with a float each. A thread to an output, blocks ascending:
//
//     acc = fma(float(sum of q * a), d_w * d_x, acc)
//
// Integers have one sum, so the bits are those of every other device. Threads: 64 columns of a row. Contract: int32/chain.
kernel void gemv_q4_0(device const char* x [[buffer(0)]], device const uchar* w [[buffer(1)]],
                      device uint* y [[buffer(2)]], device const uint* shape [[buffer(3)]],
                      device const float* scales [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                      uint local [[thread_index_in_threadgroup]]) {
  uint n = shape[1], k = shape[2], blocks = k / 32, i = group.y, j = group.x * 64 + local;
  if (j >= n) {
    return;
  }
  float acc = 0;
  for (uint b = 0; b < blocks; b++) {
    device const uchar* block = w + (j * blocks + b) * 18;
    device const char* a = x + i * k + b * 32;
    int sum = 0;
    for (uint e = 0; e < 16; e++) {
      sum += (int(block[2 + e] & 15) - 8) * int(a[e]) + (int(block[2 + e] >> 4) - 8) * int(a[e + 16]);
    }
    float d = float(as_type<half>(ushort(block[0] | (ushort(block[1]) << 8))));
    acc = fma(float(sum), d * scales[i * blocks + b], acc);
  }
  y[i * n + j] = canonical(acc);
}
