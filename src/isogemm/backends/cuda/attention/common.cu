// The steps of attention that every kernel shares: see contract/attention.py. Compiled without contraction, so each
// product and sum is rounded by itself. TERMS are the coefficients of exp2 on its fraction, highest power first.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#define DEVICE static __device__ __forceinline__
#ifndef TERMS
#define TERMS 1.0f
#endif

constexpr int LEAF = 128;
constexpr float LOG2E = 0x1.715476p+0f, LEAST = -127.0f, SHIFT = 12583039.0f;
#define NONE __int_as_float(0xff800000)  // -inf: the maximum of no keys

DEVICE float max_nan(float x, float y) { float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
DEVICE float finite(float m) { return m == NONE ? 0.0f : m; }
DEVICE float canonical(float x) { return x == x ? x : __int_as_float(0x7fffffff); }

// 2**x for x of at most 0.
DEVICE float exp2_of(float x) {
  constexpr float terms[] = {TERMS};
  x = max_nan(x, LEAST);
  const float k = x + SHIFT, r = x - (k - SHIFT);
  float y = terms[0];
#pragma unroll
  for (int i = 1; i < (int)(sizeof(terms) / sizeof(float)); ++i) y = __fmaf_rn(y, r, terms[i]);
  return y * __int_as_float(__float_as_int(k) << 23);
}
// The same for whole x, NaN and -inf.
DEVICE float power_of(float x) {
  x = max_nan(x, LEAST);
  const float k = x + SHIFT, r = x - (k - SHIFT);
  return (r + 1.0f) * __int_as_float(__float_as_int(k) << 23);
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

// Elements by kind: 0 float32, 1 bfloat16, 2 float16. NaN is 0x7fff in both 16-bit kinds.
template <int AS> DEVICE float load_as(const void* p, i64 i) {
  if (AS == 0) return ((const float*)p)[i];
  const u16 h = ((const u16*)p)[i];
  if (AS == 1) return __int_as_float((u32)h << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
template <int AS> DEVICE void store_as(void* p, i64 i, float x) {
  if (AS == 0) {
    ((float*)p)[i] = canonical(x);
    return;
  }
  u16 h;
  if (AS == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  ((u16*)p)[i] = h;
}
template <int AS> DEVICE float rounded(float x) {
  if (AS == 0) return x;
  u16 h;
  if (AS == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  if (AS == 1) return __int_as_float((u32)h << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
