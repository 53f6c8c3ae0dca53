// The steps of attention that every kernel shares: see contract/attention.py. Compiled without contraction, so each
// product and sum is rounded by itself. TERMS are the coefficients of exp2 on its fraction, highest power first.
#include "include/elements.cu"
#ifndef TERMS
#define TERMS 1.0f
#endif

constexpr int LEAF = 128;
constexpr float LOG2E = 0x1.715476p+0f, LEAST = -127.0f, SHIFT = 12583039.0f;
#define NONE __int_as_float(0xff800000)  // -inf: the maximum of no keys

DEVICE float max_nan(float x, float y) { float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
DEVICE float finite(float m) { return m == NONE ? 0.0f : m; }

// 2**x for x of at most 0: k are its whole part and SHIFT, r is the rest.
struct Parts { float k, r; };
DEVICE Parts parts_of(float x) {
  x = max_nan(x, LEAST);
  const float k = x + SHIFT;
  return {k, x - (k - SHIFT)};
}
DEVICE float scaled(float y, float k) { return y * __int_as_float(__float_as_int(k) << 23); }
// Horner's rule, in fused multiply-adds, or where it is PLAIN in products and sums, as gradients have it.
template <bool PLAIN = false> DEVICE float exp2_of(float x) {
  constexpr float terms[] = {TERMS};
  const Parts p = parts_of(x);
  float y = terms[0];
#pragma unroll
  for (int i = 1; i < (int)(sizeof(terms) / sizeof(float)); ++i)
    y = PLAIN ? __fadd_rn(__fmul_rn(y, p.r), terms[i]) : __fmaf_rn(y, p.r, terms[i]);
  return scaled(y, p.k);
}
// The same for whole x, NaN and -inf.
DEVICE float power_of(float x) {
  const Parts p = parts_of(x);
  return scaled(p.r + 1.0f, p.k);
}

// One leaf joins: o = fma(o_n, b, o * a) and l likewise.
struct Factors { float a, b; };
DEVICE Factors join(float& m, float m_n) {
  const float largest = fmaxf(m, m_n), u = finite(largest);
  const Factors f{power_of(m - u), m_n == NONE ? -0.0f : power_of(m_n - u)};
  m = largest;
  return f;
}
DEVICE float finish(float o, float over, float l) { return l == 0.0f ? 0.0f : canonical(__fmaf_rn(o, over, 0.0f)); }

template <int AS> DEVICE float rounded(float x) { return AS == 0 ? x : widen<AS>(narrow<AS>(x)); }

// A box of k, v or q by the tensor copy engine.
DEVICE void load_box(u32 to, const Map* map, u32 bar, int d, int token, int head, int item) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(d), "r"(token), "r"(head), "r"(item) : "memory");
}
