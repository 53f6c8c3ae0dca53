// b as rows of quantized blocks, laid as isogemm.backends.webgpu.planes has them: every row begins at 16 bytes, and so
// does what is loaded at once. A row is named by its first word; strides and offsets of b are counted in pairs of bytes.
struct Eight {
  low: vec4<u32>,  // 32 codes, four to a word
  high: vec4<u32>,
}

// Of a row: K is counted in words where activations are codes.
fn blocks_of() -> u32 {
  return p.k * K_EACH / BLOCK;
}

fn row_of(j: u32) -> u32 {
  return u32(p.b_at + i32(j) * p.b_col) / 2u;
}

fn word(i: u32) -> u32 {
  let four = b_words[i / 4u];
  return four[i % 4u];
}

fn half_at(i: u32) -> u32 {
  return (word(i / 2u) >> ((i & 1u) * 16u)) & 0xffffu;
}

fn signed_byte(byte: u32) -> i32 {
  return i32(byte << 24u) >> 24u;
}
