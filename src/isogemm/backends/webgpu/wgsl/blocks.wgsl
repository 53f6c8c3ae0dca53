// b as rows of quantized blocks, bytes as they are in a file. Blocks have an even number of bytes, and rows begin at
// even ones: strides and offsets of b are counted in pairs of bytes.
fn half_at(byte: u32) -> u32 {
  return (b_words[byte >> 2u] >> ((byte & 2u) << 3u)) & 0xffffu;
}

fn byte_at(byte: u32) -> u32 {
  return (b_words[byte >> 2u] >> ((byte & 3u) << 3u)) & 0xffu;
}

fn word_at(byte: u32) -> u32 {
  return half_at(byte) | (half_at(byte + 2u) << 16u);
}

// The first byte of a block of column j.
fn block_at(block: u32, j: u32) -> u32 {
  return 2u * u32(p.b_at + i32(j) * p.b_col) + block * BYTES;
}

fn signed_byte(byte: u32) -> i32 {
  return i32(byte << 24u) >> 24u;
}
