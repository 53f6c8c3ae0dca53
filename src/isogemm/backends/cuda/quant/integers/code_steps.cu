// Rows of activations to 8-bit codes, as isogemm.contract.int32 defines them: every step one float32 operation to nearest.
//
//     32:   d = A / 127; codes x * (1 / d), halves away from zero; the scale is d rounded to float16
//     256:  r = 127 / A; codes x * r, halves to even; the scale is 1 / r
//
// A is the block's largest magnitude. Where 1 / d (or r) is infinite the codes are 0 (and the scale of 256); where the block
// holds an infinity or a NaN the codes are 0 and the scale is NaN.
//
// After include/elements.cu. A warp takes 256 of one row, a lane 8 neighbours. Macros: BLOCK 32 or 256; SUB 16 or 32, elements of a
// sum; TYPE of x (0 float32, 1 bfloat16, 2 float16); VEC whether x is read 16 bytes at a time; SUMS, what is kept of sums of
// codes:
//     0  nothing     2  the sum as a float32     4  two sums, of neighbours along k, in the halves of a word
// and, with BLOCK 32, HALVES: scales as float16, which they are.
//
// Where results lie, with `tiles` of 8 rows and `rows` of them in all:
//     codes   [k / 64][tile][lane][4 steps of 16 of k] words; lane 4 g + t holds row g of the tile, and of each step the four
//             codes of k = 2 t + (0, 8, 1, 9), the order in which quant/layout.py has those of a weight
//     scales  [block][rows] float32; with SUMS 2 each is followed by the sum
//     sums    [pair of sub-blocks][rows] words, with SUMS 4
// and with HALVES
//     scales  [k / 64][rows][2 blocks] float16
//     sums    [block][rows] float32, with SUMS 2
// K is padded to a multiple of 64 with codes, scales and sums of 0.

#ifndef HALVES
#define HALVES 0
#endif

// Eight neighbours of a row from element i on.
DEVICE void load(float (&v)[8], const void* x, i64 i, i64 column) {
  if (VEC && TYPE == 0) {
    const float4 a = *(const float4*)((const float*)x + i), b = *(const float4*)((const float*)x + i + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else if (VEC) {
    const uint4 a = *(const uint4*)((const u16*)x + i);
    const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = widen<TYPE>((u16)(words[j / 2] >> 16 * (j & 1)));
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = load_as<TYPE>(x, i + j * column);
  }
}

// Among the lanes of one block.
DEVICE u32 largest(u32 a) {
#pragma unroll
  for (int step = 1; step < BLOCK / 8; step *= 2) a = max(a, __shfl_xor_sync(~0u, a, step));
  return a;
}
// Among the lanes of one sum.
DEVICE int summed(int a) {
#pragma unroll
  for (int step = 1; step < SUB / 8; step *= 2) a += __shfl_xor_sync(~0u, a, step);
  return a;
}

struct Scale {
  float factor, scale;  // codes are the values times the factor, rounded
  bool finite;
};
DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000) != 0x7f800000; }
DEVICE Scale scale_of(u32 most) {
  Scale s;
  s.finite = most < 0x7f800000;
  const float a = __uint_as_float(most);
  if (BLOCK == 32) {
    const float d = __fdiv_rn(a, 127.0f), r = __fdiv_rn(1.0f, d);
    s.scale = widen<2>(narrow<2>(d));
    s.factor = is_finite(r) ? r : 0.0f;
  } else {
    const float r = __fdiv_rn(127.0f, a);
    s.factor = is_finite(r) ? r : 0.0f;
    s.scale = is_finite(r) ? __fdiv_rn(1.0f, r) : 0.0f;
  }
  if (!s.finite) s.factor = 0.0f, s.scale = __uint_as_float(0x7fffffff);
  return s;
}
// Elements `first` to first + 7 of a row of k that begins at `at`, +0 beyond it, and the scale of their block.
DEVICE Scale load_scaled(float (&v)[8], const void* x, i64 at, i64 column, int first, int k) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = 0.0f;
  if (first < k) load(v, x, at + first * column, column);
  u32 most = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) most = max(most, __float_as_uint(v[j]) & 0x7fffffff);
  return scale_of(largest(most));
}
DEVICE int code_of(float x, const Scale& s) {
  const float y = __fmul_rn(x, s.factor);
  int q;
  if (BLOCK == 32) {
    const float size = fabsf(y), below = floorf(size);
    q = (int)below + (__fsub_rn(size, below) >= 0.5f);
    if (y < 0.0f) q = -q;
  } else {
    q = __float2int_rn(y);
  }
  return s.finite ? q : 0;
}

// The scale, where `in`, and what is kept of `sum`, that of the lane's own SUB; every lane takes part in the shuffle.
DEVICE void store(float* scales, int* sums, int sum, float scale, int k, int row, int rows, int lane, bool in) {
  const i64 at = (i64)(k / BLOCK) * rows + row;
  if (in && lane % (BLOCK / 8) == 0) {
    if (HALVES) {
      ((u16*)scales)[2 * ((i64)(k / 64) * rows + row) + k / 32 % 2] = narrow<2>(scale);
      if (SUMS == 2) ((float*)sums)[at] = (float)sum;
    } else if (SUMS == 2) *(float2*)(scales + 2 * at) = make_float2(scale, (float)sum);
    else scales[at] = scale;
  }
  if (SUMS == 4) {
    const int next = __shfl_down_sync(~0u, sum, SUB / 8);
    if (in && lane % (SUB / 4) == 0) sums[(i64)(k / (2 * SUB)) * rows + row] = (sum & 0xffff) | next << 16;
  }
}

// 256 of a row from `first` - 8 * lane on. `codes` is where the row's tile begins, `chunk` the bytes from 64 of k to the next,
// g the row in the tile; scales and sums have `rows` rows, and this is number `row`.
DEVICE void quantize(const void* x, i64 at, i64 column, int first, int k, u8* codes, i64 chunk, int g, float* scales, int* sums, int row, int rows, int lane) {
  float v[8];
  const Scale s = load_scaled(v, x, at, column, first, k);
  u32 low = 0, high = 0;
  int sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int q = code_of(v[j], s);
    sum += q;
    (j < 4 ? low : high) |= (u32)(q & 255) << 8 * (j & 3);
  }
  sum = summed(sum);
  // Lanes 2 i and 2 i + 1 have the two halves of a step of 16: the former makes the words of t = 0 and 1, the latter 2 and 3.
  const bool odd = lane & 1;
  const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  const u32 lower = odd ? other : low, upper = odd ? high : other;
  const bool in = first < (k + 63) / 64 * 64;
  if (in) {
    u8* to = codes + first / 64 * chunk + (g * 4 + 2 * odd) * 16 + first % 64 / 16 * 4;
    *(u32*)to = __byte_perm(lower, upper, 0x5140);
    *(u32*)(to + 16) = __byte_perm(lower, upper, 0x7362);
  }
  store(scales, sums, sum, s.scale, first, row, rows, lane, in);
}
