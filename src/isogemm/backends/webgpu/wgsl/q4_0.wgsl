// 32 codes of 4 bits, the low nibbles first: byte i has element i and element i + 16. Mended: the source read the two
// nibbles of a byte as neighbours. The codes of a row lie before its scales.
const BLOCK = 32u;
const SUB = 32u;
const ZERO = 8;

fn codes(row: u32, group: u32) -> u32 {
  return (word(row + 4u * (group / 8u) + (group & 3u)) >> (group & 4u)) & 0x0f0f0f0fu;
}

fn eight(row: u32, run: u32) -> Eight {
  let x = b_words[row / 4u + run];
  return Eight(x & vec4<u32>(0x0f0f0f0fu), (x >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu));
}

fn scale_of(row: u32, sub: u32) -> i32 {
  return 1;
}

fn d_of(row: u32, block: u32) -> f32 {
  return half_of(half_at(2u * row + 8u * blocks_of() + block));
}
