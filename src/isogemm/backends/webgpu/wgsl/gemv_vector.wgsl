// As gemv_simd_multi and gemv_batched, for rows that lie along K at whole vectors of words: what a thread loads at once
// are its LANES lanes, and UNROLL loads of each row are under way before the first is used; with AHEAD, those of the
// next steps are, before these are used.
//
//     lane[l] = fma(a[i, k], b[k, j], lane[l])        k = l, l + 32, l + 64, ...
//
// A group of THREADS threads takes OUTPUTS columns and ROWS rows of x. Rows and columns beyond the last are read as the
// last and not stored. K is a multiple of LANES, as strides are. Where a number may be dropped (see guard), the sums of
// a workgroup are made by integers instead. Contract: lanes32.
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let thread = local % THREADS;
  let i = group.y * ROWS;
  let j = (group.x * (WORKGROUP / THREADS) + local / THREADS) * OUTPUTS;
  let pieces = p.k / LANES;
  let steps = (max(pieces, thread) - thread + THREADS - 1u) / THREADS;
  #for r in ROWS
  let a_$r = u32(p.a_at + i32(min(i + $ru, p.m - 1u)) * p.a_row) / LANES + thread;
  var low_a_$r = Low(0xffffffffu);
  #end
  #for o in OUTPUTS
  let b_$o = u32(p.b_at + i32(min(j + $ou, p.n - 1u)) * p.b_col) / LANES + thread;
  var low_b_$o = Low(0xffffffffu);
  #end
  #for r in ROWS
  #for o in OUTPUTS
  #for w in WORDS
  var s_$r_$o_$w = Held();
  #end
  #end
  #end
  var step = 0u;
  #for q in AHEAD
  #for u in UNROLL
  #for o in OUTPUTS
  var next_$u_$o = WordB();
  if (steps >= UNROLL) {
    next_$u_$o = b_words[b_$o + $uu * THREADS];
  }
  #end
  #end
  #end
  for (; step + UNROLL <= steps; step += UNROLL) {
    #for q in BEHIND
    #for u in UNROLL
    #for o in OUTPUTS
    let y_$u_$o = b_words[b_$o + (step + $uu) * THREADS];
    #end
    #end
    #end
    #for u in UNROLL
    #for r in ROWS
    let x_$u_$r = a_words[a_$r + (step + $uu) * THREADS];
    #end
    #end
    #for q in AHEAD
    #for u in UNROLL
    #for o in OUTPUTS
    let y_$u_$o = next_$u_$o;
    next_$u_$o = b_words[b_$o + min(step + UNROLL + $uu, steps - 1u) * THREADS];
    #end
    #end
    #end
    #for u in UNROLL
    #for w in WORDS
    #for o in OUTPUTS
    let v_$u_$o_$w = held(y_$u_$o[$w]);
    #for g in GUARDS
    low_b_$o = lower(low_b_$o, v_$u_$o_$w);
    #end
    #end
    #for r in ROWS
    let h_$u_$r_$w = held(x_$u_$r[$w]);
    #for g in GUARDS
    low_a_$r = lower(low_a_$r, h_$u_$r_$w);
    #end
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
    #for w in WORDS
    #for g in GUARDS
    low_a_$r = lower(low_a_$r, held(x_$r[$w]));
    #end
    #for o in OUTPUTS
    #for g in GUARDS
    low_b_$o = lower(low_b_$o, held(y_$o[$w]));
    #end
    s_$r_$o_$w = multiply_add_held(held(x_$r[$w]), held(y_$o[$w]), s_$r_$o_$w);
    #end
    #end
    #end
  }
  #for g in GUARDS
  var drops = false;
  #for r in ROWS
  #for o in OUTPUTS
  drops = drops || may_drop(least(low_a_$r), least(low_b_$o));
  #end
  #end
  if (any_drops(drops, local)) {
    exact_sums(i, group.x * (WORKGROUP / THREADS) * OUTPUTS, local);
    return;
  }
  #end
  var sums: array<f32, ROWS * OUTPUTS * LANES>;
  #for r in ROWS
  #for o in OUTPUTS
  #for w in WORDS
  #for h in HELD
  sums[($ru * OUTPUTS + $ou) * LANES + $wu * HELD + $hu] = one_of(s_$r_$o_$w, $hu);
  #end
  #end
  #end
  #end
  // Lanes meet by XOR, order-critical: those furthest apart first. Two threads that meet share their outputs out, where
  // there is more than one: each adds up half of them, and so each thread ends with LEFT outputs of its own.
  var output = 0u;
  var writes = true;
  #for n in LEVELS
  #for q in HALVED_$n
  sums[$q] = half_met(sums[$q], sums[$qu + HALVED_$n], MASK_$n, local);
  #end
  #for q in KEPT_$n
  sums[$q] = added(sums[$q], other(sums[$q], MASK_$n, local));
  #end
  output += select(0u, HALVED_$n / LANES, (thread & MASK_$n) != 0u);
  writes = writes && (HALVED_$n != 0u || (thread & MASK_$n) == 0u);
  #end
  #for q in LEFT
  for (var mask = LANES / 2u; mask > 0u; mask >>= 1u) {
    for (var l = $qu * LANES; l < $qu * LANES + mask; l++) {
      sums[l] = added(sums[l], sums[l + mask]);
    }
  }
  if (writes && i + (output + $qu) / OUTPUTS < p.m && j + (output + $qu) % OUTPUTS < p.n) {
    store(i + (output + $qu) / OUTPUTS, j + (output + $qu) % OUTPUTS, sums[$qu * LANES]);
  }
  #end
}

// What a thread keeps of two numbers, with the same of the thread that it meets.
fn half_met(low: f32, high: f32, mask: u32, local: u32) -> f32 {
  let up = (local & mask) != 0u;
  return added(select(low, high, up), other(select(high, low, up), mask, local));
}

// All outputs of a workgroup by integers, a thread for each.
fn exact_sums(i: u32, j: u32, local: u32) {
  const COLUMNS = WORKGROUP / THREADS * OUTPUTS;
  for (var e = local; e < ROWS * COLUMNS; e += WORKGROUP) {
    let row = i + e / COLUMNS;
    let column = j + e % COLUMNS;
    if (row < p.m && column < p.n) {
      var lanes = array<f32, 32>();  // said, as wgpu clears what a loop declares but once
      for (var k = 0u; k < p.k; k++) {
        lanes[k % 32u] = fused(load_a(row, k), load_b(k, column), lanes[k % 32u]);
      }
      for (var mask = 16u; mask > 0u; mask >>= 1u) {  // order-critical: the largest first
        for (var l = 0u; l < mask; l++) {
          lanes[l] = fused(1.0, lanes[l], lanes[l + mask]);
        }
      }
      store(row, column, lanes[0]);
    }
  }
}
