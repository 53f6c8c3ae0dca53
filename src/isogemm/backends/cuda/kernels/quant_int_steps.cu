// What the integer products share: codes of a packed weight out of their planes, exact dots by tensor cores, and the chain
//
//     acc = fma(float(S), d_w * d_x, acc);   acc = fma(float(T), o_w * d_x, acc)
//
// of isogemm.contract.int32. After hopper_ptx.cu and quant_codes.cu. Macros: those of quant_layout.macros; SUMS, see
// quant_activations.cu; EACH: 2 where there is one row of x, so that only even columns count, else 1.
//
// A weight's rows are rows of a tensor core's tile, rows of x its columns. Lane 4 g + t holds sums of rows g (e = 0, 1) and
// g + 8 (e = 2, 3) of the weight with columns 2 t (even e) and 2 t + 1.

#define MAGIC 0x4b400000  // 1.5 * 2**23: sums of blocks of 32 start here, and read as float32 they are that far above theirs
#define MAGIC_FLOAT 12582912.0f

constexpr bool SHORT_BLOCKS = Q_BLOCK == 32;

// acc = sum of a * b: 16 rows of unsigned codes, 8 columns of signed ones, 32 or 16 of K.
DEVICE void dot32(int (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void dot16(int (&acc)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3]) : "r"(a0), "r"(a1), "r"(b));
}

// A lane's stored codes of 64 of K: [16 of K][row g or g + 8], four bytes each.
typedef u32 Fours[4][2];
DEVICE void fours_of(Fours& a, const u8* step, u32 lane) {
  Words w;
  load_words(w, step, lane);
#pragma unroll
  for (int f = 0; f < 8; ++f) a[f / 2][f % 2] = codes(w, f);
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

// Blocks of 32: sums and scales of x at columns 2 t and 2 t + 1.
struct Pair { int sum[2]; float d[2]; };
DEVICE Pair pair_of(const int* p) {
  if (EACH == 2) {
    const int2 v = *(const int2*)p;
    return {{v.x, v.x}, {__int_as_float(v.y), 0.0f}};
  }
  const int4 v = *(const int4*)p;
  return {{v.x, v.z}, {__int_as_float(v.y), __int_as_float(v.w)}};
}
DEVICE void begin_short(int (&s)[4], const Pair& x) {
#pragma unroll
  for (int e = 0; e < 4; ++e) s[e] = SUMS == 1 ? x.sum[e % 2] : MAGIC;
}
// order-critical: S before T.
DEVICE void chain_short(float (&acc)[4], const int (&s)[4], const Floats& w, const Pair& x) {
  float v[4];
#pragma unroll
  for (int e = 0; e < 4; e += EACH) v[e] = __fsub_rn(__int_as_float(s[e]), MAGIC_FLOAT);
  chain(acc, v, w.d, x.d);
  if (Q_FLOATS_EACH == 2) {
#pragma unroll
    for (int e = 0; e < 4; e += EACH) v[e] = __int_as_float(x.sum[e % 2]);
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
constexpr int STEP_WORDS = SUMS == 4 ? STEP_SUBS / 2 : STEP_SUBS;

// s += the sum over one sub-block of a step times its scale. `sums` are x's at column 2 t, of the step's first sub-block.
DEVICE void add_sub(int (&s)[4], const Fours& a, const uint4& b, int j, u32 ints, const int* sums, i64 rows) {
  const u32 x[4] = {b.x, b.y, b.z, b.w};
  int dot[4] = {0, 0, 0, 0};
  if (SUMS == 3) {
    const int2 zero = *(const int2*)(sums + j * rows);
    dot[0] = dot[2] = zero.x, dot[1] = dot[3] = zero.y;
  }
  if (Q_SUB == 32) dot32(dot, a[2 * j % 4][0], a[2 * j % 4][1], a[(2 * j + 1) % 4][0], a[(2 * j + 1) % 4][1], x[2 * j % 4], x[(2 * j + 1) % 4]);
  else dot16(dot, a[j][0], a[j][1], x[j]);
#pragma unroll
  for (int e = 0; e < 4; e += EACH) s[e] += int_scale(ints, e / 2) * dot[e];
}
// t += the offsets of two sub-blocks times x's sums.
DEVICE void add_mins(int (&t)[4], u32 mins, const int* sums) {
  const int2 sum = *(const int2*)sums;
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
  for (int e = 0; e < 4; e += EACH) v[e] = __int2float_rn(s[e]);
  chain(acc, v, w.d, x);
  if (SUMS == 4) {
#pragma unroll
    for (int e = 0; e < 4; e += EACH) v[e] = __int2float_rn(t[e]);
    chain(acc, v, w.o, x);
  }
}
