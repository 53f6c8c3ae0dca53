// Elements of two bytes, copied to lines of a multiple of 8 of them; zeros beyond `inner`.
//
// to[item][line][i] = from[item * each + line * step + i * unit]. Two operands at most, by blockIdx.y. A thread writes 16
// bytes at a time. Where lines lie closer together than a line's elements, neighbours have neighbouring lines. Where unit
// is 1, one reads words of 4 bytes, whatever half of one a line starts in: of one that starts in the second half the element
// before it too, which is there, as the operand itself starts at a multiple of 16 bytes. It reads nothing beyond a line's
// last element.

#include "include/hopper_ptx.cu"

struct Operand {
  const u16* from;
  uint4* to;
  i64 step, unit, each;
  int lines, inner, words, items;  // words of 16 bytes in a line
};

DEVICE uint4 eight(const u16* line, i64 unit, int first, int inner) {
  u32 w[5];
  if (unit == 1 && first + 8 <= inner) {
    const u16* at = line + first;
    const bool half = (u64)at & 2;
    const u32* whole = (const u32*)(at - half);
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __ldg(whole + i);
    if (half) {
      w[4] = __ldg(at + 7);
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = first + 2 * i;
      const u32 low = j < inner ? __ldg(line + j * unit) : 0, high = j + 1 < inner ? __ldg(line + (j + 1) * unit) : 0;
      w[i] = low | high << 16;
    }
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

extern "C" __global__ void __launch_bounds__(256)
pad(const u16* from, uint4* to, i64 step, i64 unit, i64 each, int lines, int inner, int words, int items,
    const u16* from2, uint4* to2, i64 step2, i64 unit2, i64 each2, int lines2, int inner2, int words2, int items2) {
  const Operand x = blockIdx.y ? Operand{from2, to2, step2, unit2, each2, lines2, inner2, words2, items2}
                               : Operand{from, to, step, unit, each, lines, inner, words, items};
  wait_for_predecessor();
  release_successor();  // it waits for this kernel's end before it reads what is written here
  const u32 count = (u32)x.items * x.lines * x.words;
  const bool turned = x.unit != 1 && llabs(x.step) < llabs(x.unit);
  const u32 near = turned ? x.lines : x.words, far = turned ? x.words : x.lines;
#pragma unroll 4
  for (u32 i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    const u32 row = i / near, item = row / far, slow = row - item * far, fast = i - row * near;
    const u32 line = turned ? fast : slow, word = turned ? slow : fast;
    x.to[(item * x.lines + line) * x.words + word] = eight(x.from + item * x.each + line * x.step, x.unit, 8 * word, x.inner);
  }
}
