// 256 codes of 6 bits: four bits in 128 bytes, two more in 64, sixteen signed scales and d. In a row each of these lies
// before the next.
const BLOCK = 256u;
const SUB = 16u;
const ZERO = 32;

fn codes(row: u32, group: u32) -> u32 {
  let half = group / 32u;
  let inside = group & 31u;
  let low = (word(row + 16u * half + (inside & 15u)) >> ((inside & 16u) >> 2u)) & 0x0f0f0f0fu;
  let high = (word(row + 32u * blocks_of() + 8u * half + (inside & 7u)) >> (2u * (inside / 8u))) & 0x03030303u;
  return low | (high << 4u);
}

fn eight(row: u32, run: u32) -> Eight {
  let at = row / 4u + 4u * (run / 4u) + 2u * (run & 1u);
  let above = row / 4u + 8u * blocks_of() + 2u * (run / 4u);
  let up = vec4<u32>(2u * (run & 2u));
  let high_up = vec4<u32>(2u * (run & 3u));
  let nibbles = vec4<u32>(0x0f0f0f0fu);
  let pairs = vec4<u32>(0x03030303u);
  return Eight(((b_words[at] >> up) & nibbles) | (((b_words[above] >> high_up) & pairs) << vec4<u32>(4u)),
               ((b_words[at + 1u] >> up) & nibbles) | (((b_words[above + 1u] >> high_up) & pairs) << vec4<u32>(4u)));
}

fn scale_of(row: u32, sub: u32) -> i32 {
  return signed_byte(word(row + 48u * blocks_of() + sub / 4u) >> (8u * (sub & 3u)));
}

fn d_of(row: u32, block: u32) -> f32 {
  return half_of(half_at(2u * row + 104u * blocks_of() + block));
}
