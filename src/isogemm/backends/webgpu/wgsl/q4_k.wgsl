// 256 codes of 4 bits: of each 32 bytes the low nibbles, then the high ones. Eight 6-bit scales and minima in 12 bytes.
const BLOCK = 256u;
const SUB = 32u;
const BYTES = 144u;
const ZERO = 0;
const OFFSET = true;

fn codes(at: u32, group: u32) -> u32 {
  return (word_at(at + 16u + 32u * (group / 16u) + 4u * (group & 7u)) >> ((group & 8u) >> 1u)) & 0x0f0f0f0fu;
}

// Six bits for sub-block `sub` of the scales (at byte 0) or the minima (at byte 4); those of the last four are in parts.
fn six(at: u32, sub: u32, which: u32) -> i32 {
  let near = byte_at(at + 4u + which + (sub & 3u));
  if (sub < 4u) {
    return i32(near & 63u);
  }
  return i32(((byte_at(at + 12u + (sub & 3u)) >> which) & 15u) | ((near >> 2u) & 48u));
}

fn scale_of(at: u32, sub: u32) -> i32 {
  return six(at, sub, 0u);
}

fn min_of(at: u32, sub: u32) -> i32 {
  return six(at, sub, 4u);
}

fn d_of(at: u32) -> f32 {
  return widened(half_at(at));
}

fn offset_of(at: u32) -> f32 {
  return -widened(half_at(at + 2u));
}
