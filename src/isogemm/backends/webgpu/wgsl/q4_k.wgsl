// 256 codes of 4 bits: of each 32 bytes the low nibbles, then the high ones. Before them two halves and eight 6-bit
// scales and minima in 12 bytes: 144 bytes, as they are in a file.
const BLOCK = 256u;
const SUB = 32u;
const ZERO = 0;
const OFFSET = true;

fn codes(row: u32, group: u32) -> u32 {
  let inside = group & 63u;
  return (word(row + 36u * (group / 64u) + 4u + 8u * (inside / 16u) + (inside & 7u)) >> ((inside & 8u) >> 1u)) & 0x0f0f0f0fu;
}

fn eight(row: u32, run: u32) -> Eight {
  let at = row / 4u + 9u * (run / 8u) + 1u + 2u * ((run & 7u) / 2u);
  let up = vec4<u32>(4u * (run & 1u));
  return Eight((b_words[at] >> up) & vec4<u32>(0x0f0f0f0fu), (b_words[at + 1u] >> up) & vec4<u32>(0x0f0f0f0fu));
}

// Six bits for a sub-block of the scales (word 1) or the minima (word 2); those of the last four are in parts.
fn six(row: u32, sub: u32, which: u32) -> i32 {
  let head = b_words[row / 4u + 9u * (sub / 8u)];
  let up = 8u * (sub & 3u);
  let near = (head[1u + which] >> up) & 0xffu;
  let far = (((head[3] >> up) >> (4u * which)) & 15u) | ((near >> 2u) & 48u);
  return i32(select(near & 63u, far, (sub & 4u) != 0u));
}

fn scale_of(row: u32, sub: u32) -> i32 {
  return six(row, sub, 0u);
}

fn min_of(row: u32, sub: u32) -> i32 {
  return six(row, sub, 1u);
}

fn d_of(row: u32, block: u32) -> f32 {
  return half_of(half_at(2u * row + 72u * block));
}

fn offset_of(row: u32, block: u32) -> f32 {
  return -half_of(half_at(2u * row + 72u * block + 1u));
}
