// Products of 8-bit activations and quantized weights, whose integers are exact; for Q4_0, Q8_0, Q4_K and Q6_K.
//
//     S = sum of s * q * a over a block,  T = sum of t * a
//     acc = fma(float(S), d_w * d_x, acc);  acc = fma(float(T), o_w * d_x, acc) where the format has an offset
//
// blocks ascending. ALONG threads have a run of 32 elements each: its codes of x stay in registers for OUTPUTS columns,
// whose blocks are loaded before the first is used. What each run gives meets in workgroup memory, where one thread to
// an output walks the blocks. The bits are those of isogemm.contract.int32 on every device: integers have one sum.
// Contract: int32/chain.
@group(0) @binding(4) var<storage, read> a_scales: array<f32>;

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
      acc = walked(acc, local, min(ALONG, runs - begin));
    }
  }
  if (walker) {
    store(own_row, own_column, acc);
  }
}
