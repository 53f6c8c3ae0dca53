// Runs of 32 elements of a block, and the integers that they give.
const RUNS = BLOCK / 32u;  // of a block
const WALKERS = ROWS * DOWN * OUTPUTS;

fn dot(w: vec4<u32>, x: vec4<u32>) -> i32 {
  return dot4I8Packed(w.x, x.x) + dot4I8Packed(w.y, x.y) + dot4I8Packed(w.z, x.z) + dot4I8Packed(w.w, x.w);
}

// Of both halves of a run; `totals` are the sums of the codes of x.
fn dots(w: Eight, low: vec4<u32>, high: vec4<u32>, totals: vec2<i32>) -> vec2<i32> {
  return vec2<i32>(dot(w.low, low), dot(w.high, high)) - ZERO * totals;
}
