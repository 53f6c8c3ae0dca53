// 32 codes of 4 bits, the low nibbles first: byte i has element i and element i + 16. Mended: the source read the two
// nibbles of a byte as neighbours.
const BLOCK = 32u;
const SUB = 32u;
const BYTES = 18u;
const ZERO = 8;
const OFFSET = false;

fn codes(at: u32, group: u32) -> u32 {
  return (word_at(at + 2u + 4u * (group & 3u)) >> (group & 4u)) & 0x0f0f0f0fu;
}

fn scale_of(at: u32, sub: u32) -> i32 {
  return 1;
}

fn min_of(at: u32, sub: u32) -> i32 {
  return 0;
}

fn d_of(at: u32) -> f32 {
  return widened(half_at(at));
}

fn offset_of(at: u32) -> f32 {
  return 0.0;
}
