// Quantized weights in registers: the numbers of quant/layout.py out of a record, and what they mean.
//
// After include/elements.cu, with the layout as macros (layout.macros): Q_LOW, Q_HIGH bits of the planes (Q_HIGH 0: one),
// Q_ZERO, Q_BLOCK, Q_SUB, Q_RECORD_K, Q_RECORD_BYTES, Q_STEP_BYTES, Q_FLOATS, Q_FLOATS_EACH, Q_INTS, Q_INTS_EACH,
// Q_SIGNED (s is signed), Q_JOINT (s and t share a byte); and KIND, what weights become: 1 bf16, 2 fp16.
// lane = 4 g + t has rows g and g + 8 ("half" 0 and 1) of a tile of 16. Pointers may be to shared or to global memory.
//
//   Words w;  load_words(w, step, lane);                 the lane's codes of 64 of K; step = record + i * Q_STEP_BYTES
//   load_words_together<CROSSED>(w, step, lane);         the same by a whole warp, from shared memory
//   uint4 s = scale_of(records, sub, g);                 of sub-block `sub` (Q_SUB of K) counted from `records`
//   dequantize(w, j, s, a);                              operand A of mma.m16n8k16 for K = 16 j .. of the step
//   dequantize_floats(w, j, scale_of_floats(...), x);    the same as float32: x[2 * high + half][odd]
//   codes(w, 2 * j + half);                              four codes of row g + 8 half as bytes, K = 16 j + 2 t + (0, 8, 1, 9)
// j and fields are to be constants after unrolling.
//
// Exactness. In float32 (d s) q and o t need 24 bits at most, so fma(q, d s, o t) has the bits of the formula; so has
// fma(q + zero, d s, -zero d s) where there is no o. A code is read as a subnormal fp16 number, code * 2^(at - 24), and
// widened: exact, and the power of two is in the scale. Rounding to 16 bits is one instruction for two weights.
// Without integer scales there is a shorter way in 16 bits: SHORT.
// A weight of zero may come out with the other sign, which no product's bits depend on: accumulators start at +0.

#ifndef KIND
#define KIND 1
#endif

constexpr int LOW_FIELDS = 8 / Q_LOW, HIGH_FIELDS = Q_HIGH ? 8 / (Q_HIGH ? Q_HIGH : 1) : 8;
constexpr u32 LOW_MASK = (1u << Q_LOW) - 1, HIGH_MASK = (1u << Q_HIGH) - 1;
constexpr int SUBS = Q_RECORD_K / Q_SUB;  // of a row in a record
// fp16: d q is the product of two fp16 numbers, rounded once. bf16: d = dh + dl, of 8 and of 3 bits; dl q is exact for
// codes of 5 bits, so fma(dh, q, dl q) is rounded once.
constexpr bool SHORT = Q_BLOCK == 32 && Q_FLOATS_EACH == 1 && (KIND == 2 || Q_LOW + Q_HIGH <= 5);

struct Words { u32 low[Q_LOW], high[Q_HIGH ? Q_HIGH : 1]; };

DEVICE void load_words(Words& w, const u8* step, u32 lane) {
#pragma unroll
  for (int i = 0; i < Q_LOW; ++i) w.low[i] = ((const u32*)step)[32 * i + lane];
#pragma unroll
  for (int i = 0; i < Q_HIGH; ++i) w.high[i] = ((const u32*)step)[32 * (Q_LOW + i) + lane];
}
// ldmatrix of COUNT matrices, lane i with the address of row i % 8 of matrix i / 8; CROSSED: transposed.
template <int COUNT, bool CROSSED> DEVICE void load_matrices(u32* to, u32 at) {
#define LOAD(count, how, places, ...) asm volatile("ldmatrix.sync.aligned.m8n8.x" count how ".shared.b16 {" places "}, " __VA_ARGS__)
#define LOADS(how)                                                                                           \
  if constexpr (COUNT == 1) LOAD("1", how, "%0", "[%1];" : "=r"(to[0]) : "r"(at));                           \
  if constexpr (COUNT == 2) LOAD("2", how, "%0, %1", "[%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at));          \
  if constexpr (COUNT == 4) LOAD("4", how, "%0, %1, %2, %3", "[%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at))
  if constexpr (CROSSED) { LOADS(".trans"); }
  else { LOADS(""); }
#undef LOADS
#undef LOAD
}
template <int COUNT, bool CROSSED> DEVICE void load_plane(u32* to, u32 at, u32 lane) {
  constexpr int STEP = COUNT < 4 ? COUNT : 4;
#pragma unroll
  for (int i = 0; i < COUNT; i += STEP) load_matrices<STEP, CROSSED>(to + i, at + 128 * i + lane % (8 * STEP) * 16);
}
// The same by a whole warp together. CROSSED: with lane = 4 c + r, the codes of a field 16 bits apart are those of rows
// 2 r and 2 r + 1 instead, both at K = 16 j + 8 high + c.
template <bool CROSSED> DEVICE void load_words_together(Words& w, const u8* step, u32 lane) {
  load_plane<Q_LOW, CROSSED>(w.low, shared(step), lane);
  if constexpr (Q_HIGH > 0) load_plane<Q_HIGH, CROSSED>(w.high, shared(step) + 128 * Q_LOW, lane);
}

// Four 8 x 8 blocks of a warp, lane i with the address of row i % 8 of block i / 8.
DEVICE void store_matrices(u32 at, const u32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

DEVICE u32 moved(u32 x, int right) { return right >= 0 ? x >> right : x << -right; }
// The codes of a field in bytes `high` and `high + 2`, at bits `at` and `16 + at` of `pattern`.
DEVICE u32 pair(const Words& w, int field, int high, int at, u32 pattern) {
  const int p = 8 * high + Q_LOW * (field % LOW_FIELDS);
  u32 x = moved(w.low[field / LOW_FIELDS], p - at);
  // One instruction; left to itself the compiler makes it two, each with a constant of its own.
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(x) : "r"(x), "r"((LOW_MASK << at) * 0x10001u), "r"(pattern));
  if constexpr (Q_HIGH > 0) {
    const int h = 8 * high + Q_HIGH * (field % HIGH_FIELDS), to = at + Q_LOW;
    x |= moved(w.high[field / HIGH_FIELDS], h - to) & (HIGH_MASK << to) * 0x10001u;
  }
  return x;
}
DEVICE u32 codes(const Words& w, int field) {
  u32 x = moved(w.low[field / LOW_FIELDS], Q_LOW * (field % LOW_FIELDS)) & LOW_MASK * 0x1010101u;
  if constexpr (Q_HIGH > 0)
    x |= moved(w.high[field / HIGH_FIELDS], Q_HIGH * (field % HIGH_FIELDS) - Q_LOW) & (HIGH_MASK << Q_LOW) * 0x1010101u;
  return x;
}

DEVICE void widen(u32 x, float& low, float& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(x));
}
DEVICE u32 add_pair(u32 x, u32 y) {
  u32 d;
  if (KIND == 1) asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  else asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  return d;
}
DEVICE u32 mul_pair(u32 x, u32 y) {
  u32 d;
  if (KIND == 1) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  return d;
}
DEVICE u32 fma_pair(u32 x, u32 y, u32 z) {
  u32 d;
  if (KIND == 1) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
  else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
  return d;
}

// The same with bits 16 to 31 of y in place of both of its halves: an operand's form, no instruction.
DEVICE u32 mul_high(u32 x, u32 y) {
  u32 d;
  asm("{\n.reg .b16 l, h;\n.reg .b32 two;\nmov.b32 {l, h}, %2;\nmov.b32 two, {h, h};\nmul.rn.bf16x2 %0, %1, two;\n}" : "=r"(d) : "r"(x), "r"(y));
  return d;
}
DEVICE u32 fma_high(u32 x, u32 y, u32 z) {
  u32 d;
  asm("{\n.reg .b16 l, h;\n.reg .b32 two;\nmov.b32 {l, h}, %2;\nmov.b32 two, {h, h};\nfma.rn.bf16x2 %0, %1, two, %3;\n}"
      : "=r"(d) : "r"(x), "r"(y), "r"(z));
  return d;
}

// Where a field's codes lie when they are taken out in place: shifts are free there, and the scale undoes them.
DEVICE constexpr int in_place(int field) { return Q_LOW * (field % LOW_FIELDS); }
DEVICE float two_to(int n) { return __uint_as_float((127 + n) << 23); }
constexpr float UP = 16777216.0f;  // 2**24
// Byte i of x as a float32 number, BYTE_ABOVE more: a conversion takes four times as long.
constexpr float BYTE_ABOVE = 8388608.0f;
DEVICE float byte_above(u32 x, int i) { return __uint_as_float(__byte_perm(x, 0x4b000000u, 0x7540 + i)); }

// {d s, c} of rows g and g + 8 as float32, for codes as `widen` gives them: weight = fma(code, d s, c). Integer scales are
// read as subnormal numbers too; all powers of two are in one factor.
DEVICE uint4 scale_of_floats(const u8* records, int sub, u32 g) {
  const u8* record = records + sub / SUBS * Q_RECORD_BYTES;
  const int s = sub % SUBS, block = s * Q_SUB / Q_BLOCK;
  float d[2], o[2], scale[2] = {1.0f, 1.0f}, offset[2] = {1.0f, 1.0f};
  const u8* floats = record + Q_FLOATS + (block * 16 + 2 * g) * 2 * Q_FLOATS_EACH;
  if constexpr (Q_FLOATS_EACH == 1) {
    widen(*(const u32*)floats, d[0], d[1]);
  } else {
    const uint2 x = *(const uint2*)floats;
    widen(x.x, d[0], o[0]), widen(x.y, d[1], o[1]);
  }
  constexpr bool SUBNORMAL = Q_INTS_EACH == 2 || Q_JOINT;
  const u8* ints = record + Q_INTS + (s * 16 + 2 * g) * Q_INTS_EACH;
  if constexpr (Q_INTS_EACH == 2) {  // s, t, s, t
    const u32 x = *(const u32*)ints;
    widen(x & 0xff00ff, scale[0], scale[1]), widen(x >> 8 & 0xff00ff, offset[0], offset[1]);
  } else if constexpr (Q_JOINT) {
    const u32 x = *(const u16*)ints;
    widen(x & 15 | (x & 0xf00) << 8, scale[0], scale[1]), widen(x >> 4 & 15 | (x & 0xf000) << 4, offset[0], offset[1]);
  } else if constexpr (Q_INTS_EACH == 1) {
    const u32 x = *(const u16*)ints ^ 0x8080;  // signed
    scale[0] = byte_above(x, 0) - (BYTE_ABOVE + 128.0f), scale[1] = byte_above(x, 1) - (BYTE_ABOVE + 128.0f);
  }
  uint4 found;
  float* at = (float*)&found;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // With sub-blocks of 16, `sub` is the step of 16 of K, and the place of its codes depends on that too.
    constexpr float MORE = SUBNORMAL ? UP : 1.0f;
    const bool odd = Q_SUB == 16 && Q_LOW == 2 && (sub & 1);
    const float even_up = two_to(24 - Q_LOW * half * (Q_LOW < 8)), odd_up = even_up / 16;
    at[2 * half] = d[half] * (odd ? MORE * odd_up : MORE * even_up) * scale[half];
    const float zero = odd ? -(Q_ZERO / odd_up) : -(Q_ZERO / even_up);
    at[2 * half + 1] = Q_FLOATS_EACH == 2 ? o[half] * MORE * offset[half] : at[2 * half] * zero;
  }
  return found;
}
// x[2 * high + half][odd]: row g + 8 half, K = 16 j + 2 t + 8 high + odd.
DEVICE void dequantize_floats(const Words& w, int j, const uint4& s, float (&x)[4][2]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int field = 2 * j + r % 2;
    const float d = __uint_as_float(r % 2 ? s.z : s.x), c = __uint_as_float(r % 2 ? s.w : s.y);
    float low, high;
    widen(pair(w, field, r / 2, in_place(field), 0), low, high);
    x[r][0] = __fmaf_rn(low, d, c), x[r][1] = __fmaf_rn(high, d, c);
  }
}

// In whatever form `dequantize` wants it.
DEVICE uint4 scale_of(const u8* records, int sub, u32 g) {
  if constexpr (!SHORT) return scale_of_floats(records, sub, g);
  const u8* floats = records + sub / SUBS * Q_RECORD_BYTES + Q_FLOATS + (sub % SUBS * 16 + 2 * g) * 2;
  const u32 x = *(const u32*)floats;
  if (KIND == 2) return uint4{__byte_perm(x, x, 0x1010), 0, __byte_perm(x, x, 0x3232), 0};
  float d[2], rest[2];  // bf16: dh and dl are the higher halves
  widen(x, d[0], d[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) rest[i] = d[i] - __uint_as_float(__float_as_uint(d[i]) & 0xffff0000u);
  return uint4{__float_as_uint(d[0]), __float_as_uint(rest[0]), __float_as_uint(d[1]), __float_as_uint(rest[1])};
}
DEVICE void dequantize(const Words& w, int j, const uint4& s, u32 (&a)[4]) {
  if constexpr (!SHORT) {
    float x[4][2];
    dequantize_floats(w, j, s, x);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = narrow<KIND>(x[r][0], x[r][1]);
    return;
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int field = 2 * j + r % 2, at = KIND == 2 ? in_place(field) : 0;
    const u32 d = r % 2 ? s.z : s.x, rest = r % 2 ? s.w : s.y;
    if (KIND == 2) {  // 1024 + code, or 1024 + 16 code
      u32 q = pair(w, field, r / 2, at, 0x64006400u);
      // -(1024 + zero); 1 / 16 and -(64 + zero)
      q = at ? fma_pair(q, 0x2c002c00u, (0xd400u + (Q_ZERO << 4)) * 0x10001u) : add_pair(q, (0xe400u + Q_ZERO) * 0x10001u);
      a[r] = mul_pair(q, d);
    } else {  // 128 + code, less 128 + zero
      const u32 q = add_pair(pair(w, field, r / 2, 0, 0x43004300u), (0xc300u + Q_ZERO) * 0x10001u);
      a[r] = fma_high(q, d, mul_high(q, rest));
    }
  }
}
