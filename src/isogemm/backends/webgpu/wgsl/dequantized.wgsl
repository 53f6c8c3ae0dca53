// b as the floats that its blocks stand for: d * s rounded, times the code rounded, plus o * t rounded; then rounded to
// the type of x, where products want it (`to_type`).
fn load_b(k: u32, j: u32) -> f32 {
  let row = row_of(j);
  let code = signed_byte(codes(row, k / 4u) >> (8u * (k & 3u))) - ZERO;
  let scale = rounded(d_of(row, k / BLOCK) * f32(scale_of(row, k / SUB)));
  var x = rounded(scale * f32(code));
  if (OFFSET) {
    x = x + rounded(offset_of(row, k / BLOCK) * f32(min_of(row, k / SUB)));
  }
  return to_type(x);
}
