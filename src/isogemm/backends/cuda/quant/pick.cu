// Codes of quantized weights as float32 by way of the tensor cores, which multiply them by a matrix of ones and zeros: exact,
// and each comes out in the register where, scaled and rounded, it is in an operand of the next product. Scales are finite.
//
// After quant/codes.cu. Without o, codes are bytes, four to a register, loaded crossed and left where they are in a byte; their
// sums begin at the bits of 1.5 * 2^23 less the zero point, so that as float32 numbers they are that far above the code:
//   fma(1.5 * 2^23 + q * 2^at, d s / 2^at, -1.5 * 2^23 d s / 2^at)     the last one is exact: one rounding, as of d s q
// With o they are subnormal fp16 numbers, pairs along K, code * 2^(at - 24):
//   fma(code * 2^(at - 24), d s * 2^(24 - at), o t)
//
// dequantize_picked<FIRST, COUNT>(words, j, picks, scales, w): w as `dequantize` has it; COUNT 2 of all sixteen rows, else
// those of half FIRST alone, w[FIRST] and w[FIRST + 2].

constexpr bool OFFSET = Q_FLOATS_EACH == 2, SUPER = Q_INTS_EACH > 0;
static_assert(OFFSET || Q_HIGH > 0 || Q_LOW >= 4);  // so rows of a half have one place in their bytes
constexpr float ABOVE = 12582912.0f;
// Where the codes of a field are in their bytes.
DEVICE constexpr int in_bytes(int field) { return Q_HIGH ? 0 : in_place(field); }
DEVICE u32 bytes(const Words& w, int field) {
  return Q_HIGH ? codes(w, field) : w.low[field / LOW_FIELDS] & (LOW_MASK << in_bytes(field)) * 0x1010101u;
}

// What picks codes, of this lane.
struct Picks {
  u32 a[2];  // bytes: rows 0 to 7 pick K 0 to 7 of a row of W each, rows 8 to 15 pick K 8 to 15
  u32 one;   // fp16: the identity
  __device__ __forceinline__ explicit Picks(u32 lane) {
    const u32 g = lane >> 2;
    const bool on = g >> 1 == (lane & 3);
    a[0] = !on ? 0 : g & 1 ? 0x10000 : 1, a[1] = a[0] << 8, one = !on ? 0 : g & 1 ? 0x3c000000 : 0x3c00;
  }
};
DEVICE void pick(float (&x)[4], const Picks& p, u32 four, int at) {
  int d[4];
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(p.a[0]), "r"(p.a[1]), "r"(four), "r"(0x4b400000 - (Q_ZERO << at)));
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = __int_as_float(d[e]);
}
DEVICE void pick(float (&x)[4], const Picks& p, u32 low, u32 high) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(low), "r"(high), "r"(p.one), "f"(0.0f));
}

// Of rows g and g + 8: weight = fma(code as it comes, d, c).
struct Scales { float d[2], c[2]; };
DEVICE Scales scales_of(const u8* records, int sub, u32 g) {
  const u8* record = records + sub / SUBS * Q_RECORD_BYTES;
  const int s = sub % SUBS, block = s * Q_SUB / Q_BLOCK;
  const u8* floats = record + Q_FLOATS + (block * 16 + 2 * g) * 2 * Q_FLOATS_EACH;
  const u8* ints = record + Q_INTS + (s * 16 + 2 * g) * Q_INTS_EACH;
  float d[2], o[2];
  if constexpr (OFFSET) {
    const uint2 x = *(const uint2*)floats;
    widen(x.x, d[0], o[0]), widen(x.y, d[1], o[1]);
  } else {
    widen(*(const u32*)floats, d[0], d[1]);
  }
  u32 x = 0, t = 0;  // s and t of row g in byte 0, of row g + 8 in byte STEP
  constexpr int STEP = Q_INTS_EACH == 2 ? 2 : 1;
  if constexpr (Q_INTS_EACH == 2) x = *(const u32*)ints;
  if constexpr (Q_INTS_EACH == 1) x = *(const u16*)ints;
  if constexpr (Q_SIGNED) x ^= 0x8080;
  if constexpr (Q_JOINT) t = x >> 4 & 0x0f0f, x &= 0x0f0f;
  Scales found;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (OFFSET) {
      // With sub-blocks of 16, `sub` is the step of 16 of K, and the place of its codes depends on that too.
      const float up = two_to(24 - Q_LOW * half - (Q_SUB == 16 && Q_LOW == 2 && (sub & 1) ? 4 : 0));
      const float by = d[half] * up;
      found.d[half] = SUPER ? __fmaf_rn(byte_above(x, STEP * half), by, -BYTE_ABOVE * by) : by;
      const float offset = Q_JOINT ? byte_above(t, half) : byte_above(x, STEP * half + 1);
      found.c[half] = SUPER ? __fmaf_rn(offset, o[half], -BYTE_ABOVE * o[half]) : o[half];
    } else {
      const float down = two_to(-in_bytes(half));
      found.d[half] = SUPER ? d[half] * (byte_above(x, half) - (BYTE_ABOVE + 128.0f)) : d[half] * down;
      found.c[half] = -ABOVE * found.d[half];
    }
  }
  return found;
}

DEVICE u32 rounded(float x, float y, int half, const Scales& s) {
  return narrow<KIND>(__fmaf_rn(x, s.d[half], s.c[half]), __fmaf_rn(y, s.d[half], s.c[half]));
}
template <int FIRST, int COUNT>
DEVICE void dequantize_picked(const Words& words, int j, const Picks& p, const Scales& s, u32 (&w)[4]) {
  float x[4];
  if constexpr (OFFSET && COUNT == 2) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      pick(x, p, pair(words, 2 * j, high, in_place(2 * j), 0), pair(words, 2 * j + 1, high, in_place(2 * j + 1), 0));
      w[2 * high] = rounded(x[0], x[1], 0, s), w[2 * high + 1] = rounded(x[2], x[3], 1, s);
    }
  } else {
#pragma unroll
    for (int half = FIRST; half < FIRST + COUNT; ++half) {
      const int field = 2 * j + half, at = in_place(field);
      if (OFFSET) pick(x, p, pair(words, field, 0, at, 0), pair(words, field, 1, at, 0));
      else pick(x, p, bytes(words, field), in_bytes(field));
      w[half] = rounded(x[0], x[1], half, s), w[half + 2] = rounded(x[2], x[3], half, s);
    }
  }
}
