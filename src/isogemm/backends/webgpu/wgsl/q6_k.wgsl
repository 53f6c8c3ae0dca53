// 256 codes of 6 bits: four bits in 128 bytes, two more in 64, then sixteen signed scales and d.
const BLOCK = 256u;
const SUB = 16u;
const BYTES = 210u;
const ZERO = 32;
const OFFSET = false;

fn codes(at: u32, group: u32) -> u32 {
  let half = group / 32u;
  let inside = group & 31u;
  let low = (word_at(at + 64u * half + 4u * (inside & 15u)) >> ((inside & 16u) >> 2u)) & 0x0f0f0f0fu;
  let high = (word_at(at + 128u + 32u * half + 4u * (inside & 7u)) >> (2u * (inside / 8u))) & 0x03030303u;
  return low | (high << 4u);
}

fn scale_of(at: u32, sub: u32) -> i32 {
  return signed_byte(byte_at(at + 192u + sub));
}

fn min_of(at: u32, sub: u32) -> i32 {
  return 0;
}

fn d_of(at: u32) -> f32 {
  return widened(half_at(at + 208u));
}

fn offset_of(at: u32) -> f32 {
  return 0.0;
}
