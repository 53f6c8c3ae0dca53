// As gemv_simd_multi and gemv_batched, for rows that lie along K at whole vectors of words: what a thread loads at once
// are its LANES lanes, and UNROLL loads of each row are under way before the first is used.
//
//     lane[l] = fma(a[i, k], b[k, j], lane[l])        k = l, l + 32, l + 64, ...
//
// A group of THREADS threads takes OUTPUTS columns and ROWS rows of x. Rows and columns beyond the last are read as the
// last and not stored. K is a multiple of LANES, as strides are. Contract: lanes32.
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let thread = local % THREADS;
  let i = group.y * ROWS;
  let j = (group.x * (WORKGROUP / THREADS) + local / THREADS) * OUTPUTS;
  let pieces = p.k / LANES;
  let steps = (max(pieces, thread) - thread + THREADS - 1u) / THREADS;
  #for r in ROWS
  let a_$r = u32(p.a_at + i32(min(i + $ru, p.m - 1u)) * p.a_row) / LANES + thread;
  #end
  #for o in OUTPUTS
  let b_$o = u32(p.b_at + i32(min(j + $ou, p.n - 1u)) * p.b_col) / LANES + thread;
  #end
  #for r in ROWS
  #for o in OUTPUTS
  #for w in WORDS
  var s_$r_$o_$w = Held();
  #end
  #end
  #end
  var step = 0u;
  for (; step + UNROLL <= steps; step += UNROLL) {
    #for u in UNROLL
    #for o in OUTPUTS
    let y_$u_$o = b_words[b_$o + (step + $uu) * THREADS];
    #end
    #end
    #for u in UNROLL
    #for r in ROWS
    let x_$u_$r = a_words[a_$r + (step + $uu) * THREADS];
    #end
    #for w in WORDS
    #for o in OUTPUTS
    let v_$u_$o_$w = held(y_$u_$o[$w]);
    #end
    #for r in ROWS
    let h_$u_$r_$w = held(x_$u_$r[$w]);
    #for o in OUTPUTS
    s_$r_$o_$w = multiply_add_held(h_$u_$r_$w, v_$u_$o_$w, s_$r_$o_$w);
    #end
    #end
    #end
    #end
  }
  for (; step < steps; step++) {
    #for o in OUTPUTS
    let y_$o = b_words[b_$o + step * THREADS];
    #end
    #for r in ROWS
    let x_$r = a_words[a_$r + step * THREADS];
    #for o in OUTPUTS
    #for w in WORDS
    s_$r_$o_$w = multiply_add_held(held(x_$r[$w]), held(y_$o[$w]), s_$r_$o_$w);
    #end
    #end
    #end
  }
  var lanes: array<f32, LANES>;
  var sum: f32;
  #for r in ROWS
  #for o in OUTPUTS
  #for w in WORDS
  place(&lanes, $wu, s_$r_$o_$w);
  #end
  sum = meet(lanes, local);
  if (thread == 0u && i + $ru < p.m && j + $ou < p.n) {
    store(i + $ru, j + $ou, sum);
  }
  #end
  #end
}
