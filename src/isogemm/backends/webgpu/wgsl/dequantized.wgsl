// b as the floats that its blocks stand for: d * s rounded, times the code rounded, plus o * t rounded; then rounded to
// the type of x, where products want it (`to_type`).
fn load_b(k: u32, j: u32) -> f32 {
  let at = block_at(k / BLOCK, j);
  let inside = k % BLOCK;
  let sub = inside / SUB;
  let code = signed_byte(codes(at, inside / 4u) >> (8u * (inside & 3u))) - ZERO;
  let scale = rounded(d_of(at) * f32(scale_of(at, sub)));
  var x = rounded(scale * f32(code));
  if (OFFSET) {
    x = x + rounded(offset_of(at) * f32(min_of(at, sub)));
  }
  return to_type(x);
}
