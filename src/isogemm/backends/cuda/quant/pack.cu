// Blocks of quantized weights as files hold them -> the layout of quant/layout.py. FORMAT counts layout.FORMATS.
//
// A block of threads writes one record, a thread one word of it after the other. Blocks are read bytewise: a file's blocks
// begin anywhere. Rows past n and K past k are weights of zero.

#include "include/hopper_ptx.cu"

enum { Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K };
constexpr int SUPER = FORMAT >= Q2_K;
// Bytes of a block, and where its fields begin.
constexpr int D_AT = FORMAT == Q2_K ? 80 : FORMAT == Q3_K ? 108 : FORMAT == Q6_K ? 208 : 0, O_AT = D_AT + 2;
constexpr int CODES_AT = FORMAT == Q8_0 || FORMAT == Q4_0 ? 2 : FORMAT == Q4_1 ? 4 : FORMAT == Q5_0 ? 6 : FORMAT == Q5_1 ? 8 :
                         FORMAT == Q2_K || FORMAT == Q4_K ? 16 : FORMAT == Q3_K ? 32 : FORMAT == Q5_K ? 48 : 0;
constexpr int HIGH_AT = FORMAT == Q5_0 ? 2 : FORMAT == Q5_1 ? 4 : FORMAT == Q5_K ? 16 : FORMAT == Q6_K ? 128 : 0;
constexpr int SCALES_AT = FORMAT == Q3_K ? 96 : FORMAT == Q6_K ? 192 : FORMAT == Q2_K ? 0 : 4;

// Element i of a block, the zero point still in it.
DEVICE u32 code_of(const u8* b, int i) {
  const u8 *low = b + CODES_AT, *high = b + HIGH_AT;
  if (FORMAT == Q8_0) return low[i] ^ 0x80;
  if (!SUPER) {
    const u32 code = low[i & 15] >> (i & 16) / 4 & 15;
    return FORMAT == Q5_0 || FORMAT == Q5_1 ? code | (high[i >> 3] >> (i & 7) & 1) << 4 : code;
  }
  if (FORMAT == Q2_K || FORMAT == Q3_K) {
    const u32 code = low[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
    return FORMAT == Q3_K ? code | (high[i % 32] >> i / 32 & 1) << 2 : code;
  }
  if (FORMAT == Q6_K) {
    const u32 code = low[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15;
    return code | (high[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
  }
  const u32 code = low[i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15;
  return FORMAT == Q5_K ? code | (high[i % 32] >> i / 32 & 1) << 4 : code;
}
// s, or with `which` t, of sub-block j, as the layout stores it.
DEVICE u32 integer_of(const u8* b, int j, int which) {
  const u8* s = b + SCALES_AT;
  if (FORMAT == Q2_K || FORMAT == Q6_K) return s[j];
  if (FORMAT == Q3_K) return (u8)((s[j % 8] >> j / 8 * 4 & 15 | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32);
  const u8* first = s + 4 * which;
  return j < 4 ? first[j] & 63 : s[4 + j] >> 4 * which & 15 | first[j - 4] >> 2 & 48;
}
// d, or with `which` o, of a block.
DEVICE u32 float_of(const u8* b, int which) {
  const u8* at = b + (which ? O_AT : D_AT);
  return (at[0] | at[1] << 8) ^ (which && SUPER ? 0x8000 : 0);
}

struct Rows {
  const u8* raw;
  i64 step;
  int row0, k0, n, k;
  // The block of row `slot_row` and of element `at` of the record; null outside of the matrix.
  __device__ __forceinline__ const u8* block(int slot_row, int at) const {
    if (row0 + slot_row >= n || k0 + at >= k) return nullptr;
    return raw + (row0 + slot_row) * step + (i64)((k0 + at) / Q_BLOCK) * BLOCK_BYTES;
  }
};

template <int BITS> DEVICE u32 code_word(const Rows& rows, int step, int lane, int word, int low) {
  constexpr int FIELDS = 8 / BITS;
  u32 x = 0;
  for (int byte = 0; byte < 4; ++byte)
    for (int f = 0; f < FIELDS; ++f) {
      const int field = word * FIELDS + f, row = lane / 4 + 8 * (field & 1);
      const int at = 64 * step + 16 * (field >> 1) + 8 * (byte & 1) + 2 * (lane & 3) + (byte >> 1);
      const u8* b = rows.block(row, at);
      const u32 code = b ? code_of(b, (rows.k0 + at) % Q_BLOCK) : Q_ZERO;
      x |= (code >> low & ((1u << BITS) - 1)) << (8 * byte + BITS * f);
    }
  return x;
}
DEVICE u32 word_of(const Rows& rows, int at) {
  if (at < Q_FLOATS) {
    const int step = at / Q_STEP_BYTES, in = at % Q_STEP_BYTES;
    if (in < 128 * Q_LOW) return code_word<Q_LOW>(rows, step, in % 128 / 4, in / 128, 0);
    return code_word<Q_HIGH ? Q_HIGH : 1>(rows, step, in % 128 / 4, in / 128 - Q_LOW, Q_LOW);
  }
  u32 x = 0;
  const bool ints = Q_INTS_EACH && at >= Q_INTS;
  const int size = ints ? 1 : 2, each = ints ? Q_INTS_EACH : Q_FLOATS_EACH, span = ints ? Q_SUB : Q_BLOCK;
  for (int i = 0; i < 4 / size; ++i) {
    const int index = (at - (ints ? Q_INTS : Q_FLOATS)) / size + i, which = index % each, slot = index / each % 16;
    const int unit = index / each / 16, row = slot / 2 + 8 * (slot & 1);
    const u8* b = rows.block(row, unit * span);
    if (b) x |= (ints ? integer_of(b, unit, which) : float_of(b, which)) << (8 * size * i);
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(256)
quant_pack(const u8* raw, u32* out, i64 step, int n, int k) {
  const int records = (k + Q_RECORD_K - 1) / Q_RECORD_K;
  const Rows rows{raw, step, (int)(blockIdx.x / records) * 16, (int)(blockIdx.x % records) * Q_RECORD_K, n, k};
  u32* const to = out + (i64)blockIdx.x * (Q_RECORD_BYTES / 4);
  for (int i = threadIdx.x; i < Q_RECORD_BYTES / 4; i += blockDim.x) to[i] = word_of(rows, 4 * i);
}
// Launched behind it, without programmatic launch: a kernel that reads packed weights before its predecessor has ended
// cannot begin before this one has, hence not before they are written.
extern "C" __global__ void settle() {}
