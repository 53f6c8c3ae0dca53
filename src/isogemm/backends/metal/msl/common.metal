// y[m, n] = x[m, k] @ w[n, k].T, all rows contiguous; T is half or float, sums are float. shape holds m, n and k.
using namespace metal;

// Every NaN is stored as the one of the contracts.
inline uint canonical(float x) {
  uint bits = as_type<uint>(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : bits;
}

// The sum of 32 lanes by XOR: lane l meets l ^ 16, then l ^ 8, ^ 4, ^ 2, ^ 1. A SIMD group of Apple's has 32 threads.
inline float meet(float lane) {
  for (uint mask = 16; mask > 0; mask >>= 1) {  // order-critical: the largest first
    lane += simd_shuffle_xor(lane, mask);
  }
  return lane;
}
