// What the operations along rows share: operands where they lie, exp and log of isogemm.contract.rows, sums in lanes.
//
// Every operation is one of IEEE 754 in float32, to nearest even, with subnormals: nothing is contracted (--fmad=false), and
// fma stands where it is written. Types: 0 float32, 1 bfloat16, 2 float16, NONE where an operand is absent.

#include "include/elements.cu"
#define NONE -1
#define EVERY 0xffffffff

DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float infinity() { return __uint_as_float(0x7f800000); }

// Where rows lie: their number, the last three extents of four leading dimensions, each with a number that divides by it, and
// for each of three operands the steps of the four, in elements. With DIMS 1 only the last step counts.
struct Spot {
  u32 i[4];
};
struct alignas(64) Place {
  u32 rows, shifts, inner[3][2];
  i64 step[3][4];
  // n / inner[k] for n below 2**31: (n + high half of n * inner[k][1]) >> shift.
  __device__ __forceinline__ u32 quotient(int k, u32 n) const {
    return (n + __umulhi(n, inner[k][1])) >> (shifts >> 8 * k & 31);
  }
  __device__ __forceinline__ Spot spot(u32 row) const {
    if (DIMS == 1) return {{0, 0, 0, row}};
    const u32 u = quotient(2, row), v = quotient(1, u), w = quotient(0, v);
    return {{w, v - w * inner[0][0], u - v * inner[1][0], row - u * inner[2][0]}};
  }
  __device__ __forceinline__ i64 at(int operand, const Spot& s) const {
    const i64 last = s.i[3] * step[operand][3];
    if (DIMS == 1) return last;
    return s.i[0] * step[operand][0] + s.i[1] * step[operand][1] + s.i[2] * step[operand][2] + last;
  }
  __device__ __forceinline__ i64 at(int operand, u32 row) const { return at(operand, spot(row)); }
};

// Elements from element i on.
template <int T> DEVICE const void* behind(const void* p, i64 i) { return (const char*)p + i * (T == 0 ? 4 : 2); }
template <int T> DEVICE void* behind(void* p, i64 i) { return (char*)p + i * (T == 0 ? 4 : 2); }

template <int T> DEVICE float value(const void* p, i64 i) {
  if (T == 0) return __ldg((const float*)p + i);
  return widen<T>(__ldg((const u16*)p + i));
}
template <int T> DEVICE void unpack(u32 two, float* v) {
  v[0] = T == 1 ? __uint_as_float(two << 16) : widen<T>((u16)two);
  v[1] = T == 1 ? __uint_as_float(two & 0xffff0000) : widen<T>((u16)(two >> 16));
}
// N neighbours (4 or 8), aligned to their size or to 16 bytes.
template <int T, int N> DEVICE void load(const void* p, i64 i, float* v) {
  if (T == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const float4 x = __ldg((const float4*)((const float*)p + i + j));
      v[j] = x.x, v[j + 1] = x.y, v[j + 2] = x.z, v[j + 3] = x.w;
    }
  } else if (N == 4) {
    const uint2 x = __ldg((const uint2*)((const u16*)p + i));
    unpack<T>(x.x, v), unpack<T>(x.y, v + 2);
  } else {
    const uint4 x = __ldg((const uint4*)((const u16*)p + i));
    unpack<T>(x.x, v), unpack<T>(x.y, v + 2), unpack<T>(x.z, v + 4), unpack<T>(x.w, v + 6);
  }
}

// Four neighbours as they were read, for loads that are under way while something else is done.
template <int T> struct Four {
  uint2 words;
};
template <> struct Four<0> {
  float4 words;
};
template <int T> DEVICE void read(const void* p, i64 i, Four<T>& four) {
  if constexpr (T == 0) four.words = __ldg((const float4*)((const float*)p + i));
  else four.words = __ldg((const uint2*)((const u16*)p + i));
}
template <int T> DEVICE void open(const Four<T>& four, float* v) {
  if constexpr (T == 0) v[0] = four.words.x, v[1] = four.words.y, v[2] = four.words.z, v[3] = four.words.w;
  else unpack<T>(four.words.x, v), unpack<T>(four.words.y, v + 2);
}
// Elements i to i + 3 of a row of n that begins at `at`, +0 beyond it; where VEC is 0, one by one, wherever they lie.
template <int T> DEVICE void read(const void* p, i64 at, i64 column, int i, int n, Four<T>& four) {
  if (VEC) {
    if (i < n) read<T>(p, at + i, four);
    else four = {};
    return;
  }
  if constexpr (T == 0) {
    float* v = (float*)&four;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = i + j < n ? __ldg((const float*)p + at + (i + j) * column) : 0.0f;
  } else {
    u16* v = (u16*)&four;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = i + j < n ? __ldg((const u16*)p + at + (i + j) * column) : 0;
  }
}

// As a reader of the rounded number sees it.
template <int T> DEVICE float rounded(float v) { return T == 0 ? canonical(v) : widen<T>(narrow<T>(v)); }
template <int T, int N> DEVICE void store(void* p, i64 i, const float* v) {
  if (T == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 4)
      *(float4*)((float*)p + i + j) =
          make_float4(canonical(v[j]), canonical(v[j + 1]), canonical(v[j + 2]), canonical(v[j + 3]));
  } else if (N == 4) {
    *(uint2*)((u16*)p + i) = make_uint2(narrow<T>(v[0], v[1]), narrow<T>(v[2], v[3]));
  } else {
    *(uint4*)((u16*)p + i) =
        make_uint4(narrow<T>(v[0], v[1]), narrow<T>(v[2], v[3]), narrow<T>(v[4], v[5]), narrow<T>(v[6], v[7]));
  }
}
// Elements i to i + 3 of a row of n, from `to` on, as far as there are such. WHOLE: there are.
template <int T, bool WHOLE = false> DEVICE void give(void* p, i64 to, int i, int n, const float* v) {
  if (VEC) {
    if (WHOLE || i < n) store<T, 4>(p, to, v);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (i + j < n) put<T>(p, to + j, v[j]);
}
// COUNT neighbours of a row, or where VEC is 0 elements of any step; all of them are there.
template <int T, int COUNT> DEVICE void fetch(const void* p, i64 at, i64 column, int i, float* v) {
  if constexpr (T == NONE) return;
  else if constexpr (VEC) load<T, COUNT>(p, at + i, v);
  else
#pragma unroll
    for (int j = 0; j < COUNT; ++j) v[j] = value<T>(p, at + (i + j) * column);
}
template <int T, int COUNT> DEVICE void give(void* p, i64 i, const float* v) {
  if constexpr (VEC) store<T, COUNT>(p, i, v);
  else
#pragma unroll
    for (int j = 0; j < COUNT; ++j) put<T>(p, i + j, v[j]);
}
// Elements i to i + 3 of a row of n, +0 beyond it; nothing of an operand that is absent. WHOLE: all are there.
template <int T, bool WHOLE = false> DEVICE void fetch(const void* p, i64 at, i64 column, int i, int n, float* v) {
  if constexpr (T == NONE) return;
  if (VEC) {
    if (WHOLE || i < n) load<T, 4>(p, at + i, v);
    else v[0] = v[1] = v[2] = v[3] = 0.0f;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = i + j < n ? value<T>(p, at + (i + j) * column) : 0.0f;
  }
}
// The same by way of what was read.
template <int T> DEVICE void several(const void* p, i64 at, i64 column, int i, int n, float* v) {
  if constexpr (T != NONE) {
    Four<T> four;
    read<T>(p, at, column, i, n, four);
    open<T>(four, v);
  }
}

// exp(x) without its scale: y, and k + 0x4b400000, for x from -104 to EXP_MOST.
DEVICE float exp_parts(float inside, u32& k) {
  const float shift = 12582912.0f;
  const float t = fma_(inside, 0x1.715476p+0f, shift), whole = sub(t, shift);
  const float r = fma_(whole, 0x1.05c610p-29f, fma_(whole, -0x1.62e430p-1f, inside));
  float p = 1.9875691500e-4f;
  p = fma_(p, r, 1.3981999507e-3f);
  p = fma_(p, r, 8.3334519073e-3f);
  p = fma_(p, r, 4.1665795894e-2f);
  p = fma_(p, r, 1.6666665459e-1f);
  p = fma_(p, r, 5.0000001201e-1f);
  k = __float_as_uint(t);
  return add(fma_(p, mul(r, r), r), 1.0f);
}
// Above EXP_MOST infinite, NaN stays.
DEVICE float exp_above(float x, float y) { return x <= 0x1.62e42ep+6f ? y : add(x, infinity()); }
DEVICE float exp_(float x) {
  u32 k;
  float y = exp_parts(fmaxf(x, -104.0f), k);  // at -104 and below it is +0 by its last rounding; of NaN, too
  // Exact down to 2**-125; the rest of k is one more product, which rounds where the result is subnormal.
  const u32 normal = (u32)max((int)k, 0x4b400000 - 125);
  y = __uint_as_float(__float_as_uint(y) + (normal << 23));
  y = mul(y, __uint_as_float((k - normal + 127) << 23));
  return exp_above(x, y);
}
// exp of four numbers of at most 0, `least` the least of them or NaN where one is. Where no result is subnormal the rest of the
// scale is an exponent.
DEVICE void exps(float (&v)[4], float least) {
  if (!(least >= -87.0f)) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = exp_(v[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 k;
    const float y = exp_parts(v[j], k);
    v[j] = __uint_as_float(__float_as_uint(y) + (k << 23));
  }
}
DEVICE float least_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
DEVICE float least_or_nan(const float (&v)[4]) {
  return least_or_nan(least_or_nan(v[0], v[1]), least_or_nan(v[2], v[3]));
}
DEVICE void exps(float (&v)[4]) { exps(v, least_or_nan(v)); }
// 1 + exp(x): what is below exp(-80) rounds away, so the scale is an exponent.
DEVICE float one_and_exp(float x) {
  u32 k;
  const float y = exp_parts(fmaxf(x, -80.0f), k);
  return add(1.0f, exp_above(x, __uint_as_float(__float_as_uint(y) + (k << 23))));
}
DEVICE float sigmoid(float x) { return __frcp_rn(one_and_exp(-x)); }
DEVICE float silu(float x) { return __fdiv_rn(x, one_and_exp(-x)); }

DEVICE float log_(float s) {
  const int offset = __float_as_int(s) - 0x3f3504f3;
  const float k = (float)(offset >> 23);
  const float t = sub(__int_as_float((offset & 0x7fffff) + 0x3f3504f3), 1.0f), z = mul(t, t);
  float p = 7.0376836292e-2f;
  p = fma_(p, t, -1.1514610310e-1f);
  p = fma_(p, t, 1.1676998740e-1f);
  p = fma_(p, t, -1.2420140846e-1f);
  p = fma_(p, t, 1.4249322787e-1f);
  p = fma_(p, t, -1.6668057665e-1f);
  p = fma_(p, t, 2.0000714765e-1f);
  p = fma_(p, t, -2.4999993993e-1f);
  p = fma_(p, t, 3.3333331174e-1f);
  float y = fma_(k, -2.12194440e-4f, mul(mul(t, z), p));
  y = fma_(-0.5f, z, y);
  return s == s ? fma_(k, 0.693359375f, add(t, y)) : s;
}

// v / b for a positive v of at least 2**-90, 0 or NaN, and b from 1 to 2**31, `y` its rounded reciprocal: one correction by the
// remainder. It would leave the rounded quotient unless that is next to the middle of two numbers; of those cases, all were tried.
DEVICE float quotient(float v, float b, float y) {
  const float q = mul(v, y);
  return fma_(fma_(-b, q, v), y, q);
}
// The same of any four v that are +0, positive or NaN: small ones, whose remainders are not exact, take the division.
DEVICE void divide(float (&v)[4], float b, float y) {
  u32 least = EVERY;
#pragma unroll
  for (int j = 0; j < 4; ++j) least = min(least, __float_as_uint(v[j]) - 1);
  if (least < 0x12800000 - 1) {  // 2**-90
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __fdiv_rn(v[j], b);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = quotient(v[j], b, y);
}
// exp(v) / b for four v of at most 0.
DEVICE void exps_over(float (&v)[4], float b, float y) {
  const float least = least_or_nan(v);
  exps(v, least);
  if (!(least >= -62.0f)) return divide(v, b, y);  // exp(-62) is above 2**-90
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = quotient(v[j], b, y);
}

// Four neighbouring lanes of each of a warp's threads to the sum of all 128: lanes l and l + 64 meet first, then l and
// l + 32, and so on. Each of the first two steps halves what a thread carries.
DEVICE float meet(const float* lanes) {
  const int t = threadIdx.x & 31;
  const bool high = t & 16, odd = t & 8;
  const float a = add(high ? lanes[2] : lanes[0], __shfl_xor_sync(EVERY, high ? lanes[0] : lanes[2], 16));
  const float b = add(high ? lanes[3] : lanes[1], __shfl_xor_sync(EVERY, high ? lanes[1] : lanes[3], 16));
  float c = add(odd ? b : a, __shfl_xor_sync(EVERY, odd ? a : b, 8));
#pragma unroll
  for (int step = 4; step >= 1; step /= 2) c = add(c, __shfl_xor_sync(EVERY, c, step));
  c = add(c, __shfl_xor_sync(EVERY, c, 16));
  return add(c, __shfl_xor_sync(EVERY, c, 8));
}
// The same of 128 lanes in shared memory.
DEVICE float meet_shared(const float* lanes) {
  const int t = threadIdx.x & 31;
  float c = add(add(lanes[t], lanes[t + 64]), add(lanes[t + 32], lanes[t + 96]));
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) c = add(c, __shfl_xor_sync(EVERY, c, step));
  return c;
}
// The largest of what was read; two of 16 bits at once. NaN is passed over.
template <int T> struct Largest {
  u32 two = T == 1 ? 0xff80ff80 : 0xfc00fc00;
  __device__ __forceinline__ void see(u32 next) {
    if (T == 1) asm("max.bf16x2 %0, %0, %1;" : "+r"(two) : "r"(next));
    else asm("max.f16x2 %0, %0, %1;" : "+r"(two) : "r"(next));
  }
  __device__ __forceinline__ void see(const Four<T>& four) { see(four.words.x), see(four.words.y); }
  __device__ __forceinline__ float found() const {
    float v[2];
    unpack<T>(two, v);
    return fmaxf(v[0], v[1]);
  }
};
template <> struct Largest<0> {
  float one = -infinity();
  __device__ __forceinline__ void see(const Four<0>& four) {
    one = fmaxf(one, fmaxf(fmaxf(four.words.x, four.words.y), fmaxf(four.words.z, four.words.w)));
  }
  __device__ __forceinline__ float found() const { return one; }
};
DEVICE float most(float v) {
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) v = fmaxf(v, __shfl_xor_sync(EVERY, v, step));
  return v;
}
// The same of a block of WARPS, by way of as many floats in shared memory.
template <int WARPS> DEVICE float most_of_block(float v, float* warps) {
  v = most(v);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = v;
  __syncthreads();
  v = most((threadIdx.x & 31) < WARPS ? warps[threadIdx.x & 31] : -infinity());
  __syncthreads();
  return v;
}
