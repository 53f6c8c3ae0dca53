// 32 signed bytes behind their scale.
const BLOCK = 32u;
const SUB = 32u;
const BYTES = 34u;
const ZERO = 0;
const OFFSET = false;

fn codes(at: u32, group: u32) -> u32 {
  return word_at(at + 2u + 4u * group);
}

fn scale_of(at: u32, sub: u32) -> i32 {
  return 1;
}

fn min_of(at: u32, sub: u32) -> i32 {
  return 0;
}

fn d_of(at: u32) -> f32 {
  return widened(half_at(at));
}

fn offset_of(at: u32) -> f32 {
  return 0.0;
}
