// What the integer products share: codes of a packed weight out of their planes, exact dots by tensor cores, and the chain
//
//     acc = fma(float(S), d_w * d_x, acc);   acc = fma(float(T), o_w * d_x, acc)
//
// of isogemm.contract.int32. After include/elements.cu and quant/codes.cu. Macros: those of layout.macros; SUMS, see
// quant/integers/activations.cu; EACH: 2 where there is one row of x, so that only even columns count, else 1.
//
// A weight's rows are rows of a tensor core's tile, rows of x its columns. Lane 4 g + t holds sums of rows g (e = 0, 1) and
// g + 8 (e = 2, 3) of the weight with columns 2 t (even e) and 2 t + 1.

constexpr bool SHORT_BLOCKS = Q_BLOCK == 32;
// Codes with a zero point are signed bytes, shifted up as far as they can be: the zero point goes with one XOR, and the
// shift, which is exact, is taken back from the sums.
constexpr int RAISED = Q_ZERO ? 8 - Q_LOW - Q_HIGH : 0;
// Sums of blocks of 32 are below 2**21. From the bits of 1.5 * 2**23 on, they are float32 numbers that far above theirs.
constexpr int MAGIC = SHORT_BLOCKS ? 0x4b400000 : 0;

#define DOT(shape, type, a, b) \
  asm("mma.sync.aligned." shape ".row.col.s32." type ".s8.s32 {%0, %1, %2, %3}, {" a "}, {" b "}, {%4, %4, %4, %4};" \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
// d = MAGIC + the sum of a * b: 16 rows of codes, 8 columns of those of x, 32 or 16 of K.
DEVICE void dot32(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (Q_ZERO) DOT("m16n8k32", "s8", "%5, %6, %7, %8", "%9, %10") : "r"(MAGIC), "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else DOT("m16n8k32", "u8", "%5, %6, %7, %8", "%9, %10") : "r"(MAGIC), "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void dot16(int (&d)[4], u32 a0, u32 a1, u32 b) {
  if (Q_ZERO) DOT("m16n8k16", "s8", "%5, %6", "%7") : "r"(MAGIC), "r"(a0), "r"(a1), "r"(b));
  else DOT("m16n8k16", "u8", "%5, %6", "%7") : "r"(MAGIC), "r"(a0), "r"(a1), "r"(b));
}

// A lane's codes of 64 of K: [16 of K][row g or g + 8], four bytes each.
typedef u32 Fours[4][2];
// (x & mask) ^ y: one instruction, which the compiler makes two, each with a constant of its own.
DEVICE u32 masked(u32 x, u32 mask, u32 y) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(x), "r"(mask), "r"(y));
  return d;
}
DEVICE u32 four_of(const Words& w, int f) {
  u32 x = moved(w.low[f / LOW_FIELDS], Q_LOW * (f % LOW_FIELDS) - RAISED);
  x = masked(x, (LOW_MASK << RAISED) * 0x1010101u, Q_ZERO ? 0x80808080u : 0);
  if constexpr (Q_HIGH > 0)
    x = masked(moved(w.high[f / HIGH_FIELDS], Q_HIGH * (f % HIGH_FIELDS) - Q_LOW - RAISED), (HIGH_MASK << Q_LOW + RAISED) * 0x1010101u, x);
  return x;
}
DEVICE void fours_of(Fours& a, const u8* step, u32 lane) {
  Words w;
  load_words_together<false>(w, step, lane);
#pragma unroll
  for (int f = 0; f < 8; ++f) a[f / 2][f % 2] = four_of(w, f);
}

// d (and o) of rows g and g + 8 in a block.
struct Floats { float d[2], o[2]; };
DEVICE Floats floats_of(const u8* record, int block, u32 g) {
  const u8* p = record + Q_FLOATS + (16 * block + 2 * g) * 2 * Q_FLOATS_EACH;
  Floats f;
  if (Q_FLOATS_EACH == 1) {
    const u32 two = *(const u32*)p;
    f.d[0] = f16_to_float((u16)two), f.d[1] = f16_to_float((u16)(two >> 16)), f.o[0] = f.o[1] = 0.0f;
  } else {
    const uint2 four = *(const uint2*)p;
    f.d[0] = f16_to_float((u16)four.x), f.o[0] = f16_to_float((u16)(four.x >> 16));
    f.d[1] = f16_to_float((u16)four.y), f.o[1] = f16_to_float((u16)(four.y >> 16));
  }
  return f;
}

// One step of the chain for the four elements of a tile: x are the scales of columns 2 t and 2 t + 1.
DEVICE void chain(float (&acc)[4], const float (&s)[4], const float (&w)[2], const float (&x)[2]) {
#pragma unroll
  for (int e = 0; e < 4; e += EACH) acc[e] = __fmaf_rn(s[e], __fmul_rn(w[e / 2], x[e % 2]), acc[e]);
}

// Blocks of 32: scales of x at columns 2 t and 2 t + 1, and sums of its codes where they are wanted.
struct Pair { float d[2], sum[2]; };
constexpr int PAIR = SHORT_BLOCKS && SUMS ? 2 : 1;  // words of a row
template <int WORDS> DEVICE Pair pair_of(const float* p) {
  if (WORDS == 1 && EACH == 2) return {{p[0], 0.0f}, {}};
  const float2 v = EACH == 2 || WORDS == 1 ? *(const float2*)p : float2{};
  if (WORDS == 1) return {{v.x, v.y}, {}};
  if (EACH == 2) return {{v.x, 0.0f}, {v.y, 0.0f}};
  const float4 w = *(const float4*)p;
  return {{w.x, w.z}, {w.y, w.w}};
}
// The sum over a block. `four` and `b` are those of its two steps of 16.
DEVICE void dot_short(int (&s)[4], const Fours& four, int q, const u32* b) {
  dot32(s, four[2 * q][0], four[2 * q][1], four[2 * q + 1][0], four[2 * q + 1][1], b[2 * q], b[2 * q + 1]);
}
// order-critical: S before T.
DEVICE void chain_short(float (&acc)[4], const int (&s)[4], const Floats& w, const Pair& x) {
  constexpr float DOWN = 1.0f / (1 << RAISED);
  float v[4];
#pragma unroll
  for (int e = 0; e < 4; e += EACH) v[e] = __fmaf_rn(__int_as_float(s[e]), DOWN, -12582912.0f * DOWN);  // exact
  chain(acc, v, w.d, x.d);
  if (Q_FLOATS_EACH == 2) {
#pragma unroll
    for (int e = 0; e < 4; e += EACH) v[e] = x.sum[e % 2];
    chain(acc, v, w.o, x.d);
  }
}

// Super-blocks. Words of a weight's s (and t) of rows g and g + 8 in a sub-block, as they lie; and s of one of them.
DEVICE u32 ints_of(const u8* record, int sub, u32 g) {
  const u8* p = record + Q_INTS + (16 * sub + 2 * g) * Q_INTS_EACH;
  return Q_INTS_EACH == 2 ? *(const u32*)p : (u32)*(const u16*)p;
}
DEVICE int int_scale(u32 ints, int half) {
  const u32 byte = ints >> (Q_INTS_EACH == 2 ? 16 : 8) * half;
  if (Q_JOINT) return byte & 15;
  return Q_SIGNED ? (int)(signed char)byte : (int)(byte & 255);
}
// t of two sub-blocks: those of row g in bytes 0 and 1, of row g + 8 in bytes 2 and 3.
DEVICE u32 mins_of(u32 even, u32 odd) {
  return Q_INTS_EACH == 2 ? __byte_perm(even, odd, 0x7351) : __byte_perm(even, odd, 0x5140) >> 4 & 0x0f0f0f0f;
}

constexpr int STEP_SUBS = 64 / Q_SUB;  // of 64 of K, a step; and the words of x's sums for them
constexpr int STEP_WORDS = SUMS ? STEP_SUBS / 2 : 0;

// s += the sum over sub-block j of a step times its scale.
DEVICE void add_sub(int (&s)[4], const Fours& a, const uint4& b, int j, u32 ints) {
  const u32 x[4] = {b.x, b.y, b.z, b.w};
  const int i = Q_SUB == 32 ? 2 * j % 4 : j;
  int dot[4];
  if (Q_SUB == 32) dot32(dot, a[i][0], a[i][1], a[i + 1 & 3][0], a[i + 1 & 3][1], x[i], x[i + 1 & 3]);
  else dot16(dot, a[i][0], a[i][1], x[i]);
#pragma unroll
  for (int e = 0; e < 4; e += EACH) s[e] += int_scale(ints, e / 2) * dot[e];
}
// t += the offsets of two sub-blocks times x's sums.
DEVICE void add_mins(int (&t)[4], u32 mins, const int* sums) {
  const int2 sum = EACH == 2 ? make_int2(*sums, 0) : *(const int2*)sums;
#pragma unroll
  for (int e = 0; e < 4; e += EACH) {
    const int two = e % 2 ? sum.y : sum.x;
    t[e] = e < 2 ? __dp2a_lo(two, (int)mins, t[e]) : __dp2a_hi(two, (int)mins, t[e]);
  }
}
// order-critical: S before T.
DEVICE void chain_long(float (&acc)[4], const int (&s)[4], const int (&t)[4], const Floats& w, const float (&x)[2]) {
  float v[4];
#pragma unroll
  for (int e = 0; e < 4; e += EACH) v[e] = __int2float_rn(s[e] >> RAISED);
  chain(acc, v, w.d, x);
  if (SUMS) {
#pragma unroll
    for (int e = 0; e < 4; e += EACH) v[e] = __int2float_rn(t[e]);
    chain(acc, v, w.o, x);
  }
}
