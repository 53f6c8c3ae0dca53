// Blocks of eight runs: S and T of each run, and d_w, o_w and d_x of each block.
const SUBS = 32u / SUB;  // of a run
const SMALL = 0x1p-78f;  // below it, a scale of x may lead to subnormal sums, which a device may drop

var<workgroup> sums: array<vec2<i32>, WALKERS * (ALONG + 1u)>;
var<workgroup> factors: array<vec4<f32>, WALKERS * (ALONG / RUNS)>;
var<private> exact: bool;

fn placed(at: u32, run: u32, row: u32, w: Eight, low: vec4<u32>, high: vec4<u32>, totals: vec2<i32>, d: f32) {
  let s = dots(w, low, high, totals);
  var both = vec2<i32>();
  if (SUBS == 2u) {
    both.x = scale_of(row, 2u * run) * s.x + scale_of(row, 2u * run + 1u) * s.y;
  } else {
    both.x = scale_of(row, run) * (s.x + s.y);
  }
  if (OFFSET) {
    both.y = min_of(row, run) * (totals.x + totals.y);
  }
  sums[at * (ALONG + 1u) + run % ALONG] = both;
  if (run % RUNS == 0u) {
    let block = run / RUNS;
    factors[(at * ALONG + run % ALONG) / RUNS] = vec4<f32>(d_of(row, block), offset_of(row, block), d, 0.0);
  }
}

// float(x), rounded once: both parts are exact.
fn whole(x: i32) -> f32 {
  return f32(x >> 12u) * 4096.0 + f32(x & 0xfff);
}

fn walked(begun: f32, walker: u32, many: u32) -> f32 {
  var acc = begun;
  let base = walker * (ALONG + 1u);
  for (var b = 0u; b < many; b += RUNS) {
    var both = vec2<i32>();
    for (var u = 0u; u < RUNS; u++) {
      both += sums[base + b + u];
    }
    let f = factors[(walker * ALONG + b) / RUNS];
    exact = exact || (f.z < SMALL && f.z != 0.0);
    for (var term = 0u; term < select(1u, 2u, OFFSET); term++) {
      if (exact) {
        acc = fused(whole(both[term]), fused(f[term], f.z, bitcast<f32>(0x80000000u)), acc);
      } else {
        acc = multiply_add(whole(both[term]), rounded(f[term] * f.z), acc);
      }
    }
  }
  return acc;
}
