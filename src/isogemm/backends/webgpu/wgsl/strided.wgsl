// b as floats at any strides.
fn load_b(k: u32, j: u32) -> f32 {
  return element_b(u32(p.b_at + i32(k) * p.b_row + i32(j) * p.b_col));
}
