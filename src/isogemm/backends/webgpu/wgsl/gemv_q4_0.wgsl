// Products of 8-bit activations and quantized weights, whose integers are exact; for Q4_0, Q8_0, Q4_K and Q6_K.
//
//     S = sum of s * q * a over a block,  T = sum of t * a
//     acc = fma(float(S), d_w * d_x, acc);  acc = fma(float(T), o_w * d_x, acc) where the format has an offset
//
// blocks ascending. ALONG threads have a run of 32 elements each: its codes of x stay in registers for OUTPUTS columns,
// whose blocks are loaded before the first is used. What each run gives meets in workgroup memory, where one thread to
// an output walks the blocks. The bits are those of isogemm.contract.int32 on every device: integers have one sum.
// Contract: int32/chain.
const RUNS = BLOCK / 32u;  // of a block
const SUBS = 32u / SUB;  // of a run
const WALKERS = ROWS * DOWN * OUTPUTS;
const SMALL = 0x1p-78f;  // below it, a scale of x may lead to subnormal sums, which a device may drop

@group(0) @binding(4) var<storage, read> a_scales: array<f32>;

var<workgroup> sums: array<vec2<i32>, WALKERS * (ALONG + 1u)>;  // S and T of a run; or S and the factor of a short block
var<workgroup> factors: array<vec3<f32>, WALKERS * (ALONG / RUNS)>;  // d_w, o_w and d_x of a long block

// float(x), rounded once: both parts are exact.
fn whole(x: i32) -> f32 {
  return f32(x >> 12u) * 4096.0 + f32(x & 0xfff);
}

fn dot(w: vec4<u32>, x: vec4<u32>) -> i32 {
  return dot4I8Packed(w.x, x.x) + dot4I8Packed(w.y, x.y) + dot4I8Packed(w.z, x.z) + dot4I8Packed(w.w, x.w);
}

fn placed(at: u32, run: u32, row: u32, w: Eight, low: vec4<u32>, high: vec4<u32>, totals: vec2<i32>, d: f32) {
  let slot = at * (ALONG + 1u) + run % ALONG;
  let dots = vec2<i32>(dot(w.low, low), dot(w.high, high)) - ZERO * totals;
  var s = dots.x + dots.y;
  var t = 0;
  if (SUBS == 2u) {
    s = scale_of(row, 2u * run) * dots.x + scale_of(row, 2u * run + 1u) * dots.y;
  } else if (RUNS > 1u) {
    s = scale_of(row, run) * s;
  }
  if (OFFSET) {
    t = min_of(row, run) * (totals.x + totals.y);
  }
  if (RUNS == 1u) {
    sums[slot] = vec2<i32>(s, bitcast<i32>(rounded(d_of(row, run) * d)));
    return;
  }
  sums[slot] = vec2<i32>(s, t);
  if (run % RUNS == 0u) {
    let block = run / RUNS;
    factors[at * (ALONG / RUNS) + (run % ALONG) / RUNS] = vec3<f32>(d_of(row, block), offset_of(row, block), d);
  }
}

fn step(exact: bool, x: f32, d: f32, e: f32, acc: f32) -> f32 {
  if (exact) {
    return fused(x, fused(d, e, bitcast<f32>(0x80000000u)), acc);
  }
  return multiply_add(x, rounded(d * e), acc);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let thread = local % ALONG;
  let side = local / ALONG;
  let i = group.y * ROWS;
  let j = (group.x * DOWN + side) * OUTPUTS;
  let runs = p.k / 8u;
  let blocks = runs / RUNS;
  let own_row = i + local / (DOWN * OUTPUTS);
  let own_column = group.x * DOWN * OUTPUTS + local % (DOWN * OUTPUTS);
  let walker = local < WALKERS && own_row < p.m && own_column < p.n;
  #for o in OUTPUTS
  let row_$o = row_of(min(j + $ou, p.n - 1u));
  #end
  var acc = 0.0;
  var exact = false;
  for (var begin = 0u; begin < runs; begin += ALONG) {
    let run = min(begin + thread, runs - 1u);
    #for o in OUTPUTS
    let w_$o = eight(row_$o, run);
    #end
    #for r in ROWS
    let at_$r = u32(p.a_at + i32(min(i + $ru, p.m - 1u)) * p.a_row) / 4u + 2u * run;
    let low_$r = a_words[at_$r];
    let high_$r = a_words[at_$r + 1u];
    let d_$r = a_scales[min(i + $ru, p.m - 1u) * blocks + run / RUNS];
    let ones_$r = vec4<u32>(0x01010101u);
    let totals_$r = vec2<i32>(dot(ones_$r, low_$r), dot(ones_$r, high_$r));
    #end
    workgroupBarrier();
    if (begin + thread < runs) {
      #for r in ROWS
      #for o in OUTPUTS
      placed(($ru * DOWN + side) * OUTPUTS + $ou, run, row_$o, w_$o, low_$r, high_$r, totals_$r, d_$r);
      #end
      #end
    }
    workgroupBarrier();
    if (walker) {
      let many = min(ALONG, runs - begin);
      let base = local * (ALONG + 1u);
      if (RUNS == 1u) {
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
      } else {
        for (var b = 0u; b < many; b += RUNS) {
          var x = vec2<i32>();
          for (var u = 0u; u < RUNS; u++) {
            x += sums[base + b + u];
          }
          let f = factors[local * (ALONG / RUNS) + b / RUNS];
          exact = exact || (f.z < SMALL && f.z != 0.0);
          acc = step(exact, whole(x.x), f.x, f.z, acc);
          if (OFFSET) {
            acc = step(exact, whole(x.y), f.y, f.z, acc);
          }
        }
      }
    }
  }
  if (walker) {
    store(own_row, own_column, acc);
  }
}
