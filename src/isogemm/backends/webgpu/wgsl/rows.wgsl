// a as floats at any strides.
fn load_a(i: u32, k: u32) -> f32 {
  return element_a(u32(p.a_at + i32(i) * p.a_row + i32(k) * p.a_col));
}
