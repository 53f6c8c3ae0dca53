// 32 signed bytes; the codes of a row lie before its scales.
const BLOCK = 32u;
const SUB = 32u;
const ZERO = 0;

fn codes(row: u32, group: u32) -> u32 {
  return word(row + group);
}

fn eight(row: u32, run: u32) -> Eight {
  return Eight(b_words[row / 4u + 2u * run], b_words[row / 4u + 2u * run + 1u]);
}

fn scale_of(row: u32, sub: u32) -> i32 {
  return 1;
}

fn d_of(row: u32, block: u32) -> f32 {
  return half_of(half_at(2u * row + 16u * blocks_of() + block));
}
