// Blocks of one run: S, below 2^24, and the factor d_w * d_x of each.
var<workgroup> sums: array<vec2<i32>, WALKERS * (ALONG + 1u)>;

fn placed(at: u32, run: u32, row: u32, w: Eight, low: vec4<u32>, high: vec4<u32>, totals: vec2<i32>, d: f32) {
  let s = dots(w, low, high, totals);
  sums[at * (ALONG + 1u) + run % ALONG] = vec2<i32>(s.x + s.y, bitcast<i32>(rounded(d_of(row, run) * d)));
}

fn walked(begun: f32, walker: u32, many: u32) -> f32 {
  var acc = begun;
  let base = walker * (ALONG + 1u);
  var b = 0u;
  for (; b + AHEAD <= many; b += AHEAD) {
    #for u in AHEAD
    let x_$u = sums[base + b + $uu];
    #end
    #for u in AHEAD
    acc = multiply_add(f32(x_$u.x), bitcast<f32>(x_$u.y), acc);
    #end
  }
  for (; b < many; b++) {
    let x = sums[base + b];
    acc = multiply_add(f32(x.x), bitcast<f32>(x.y), acc);
  }
  return acc;
}
