// A format without offsets.
const OFFSET = false;

fn min_of(row: u32, sub: u32) -> i32 {
  return 0;
}

fn offset_of(row: u32, block: u32) -> f32 {
  return 0.0;
}
