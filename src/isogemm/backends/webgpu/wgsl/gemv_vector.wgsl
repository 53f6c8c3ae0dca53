// As gemv_simd_multi and gemv_batched, for rows that lie along K at whole vectors of words: what a thread loads at once
// are its LANES lanes, and UNROLL loads of each row are under way before the first is used; with AHEAD, those of the
// next steps are, before these are used. With STAGED, CHUNK elements of each row of x at a time are floats in workgroup
// memory, from which all groups take them.
//
//     lane[l] = fma(a[i, k], b[k, j], lane[l])        k = l, l + 32, l + 64, ...
//
// A group of THREADS threads takes OUTPUTS columns and ROWS rows of x. Rows and columns beyond the last are read as the
// last and not stored. K is a multiple of LANES, as strides are. Where a number may be dropped (see guard), the sums of
// a workgroup are made by integers instead. Contract: lanes32.
const IN_CHUNK = CHUNK / 32u;  // steps
#for q in STAGED
var<workgroup> staged: array<Two, ROWS * CHUNK / (2u * HELD)>;  // words by twos

fn stage(i: u32, begin: u32, local: u32) {
  workgroupBarrier();
  for (var e = local; e < ROWS * IN_CHUNK * THREADS; e += WORKGROUP) {
    let row = u32(p.a_at + i32(min(i + e / (IN_CHUNK * THREADS), p.m - 1u)) * p.a_row) / LANES;
    let x = a_words[row + min(begin * THREADS + e % (IN_CHUNK * THREADS), p.k / LANES - 1u)];
    #for f in TWOS
    staged[e * TWOS + $fu] = two(held(x[2u * $fu]), held(x[2u * $fu + 1u]));
    #end
  }
  workgroupBarrier();
}
#end

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
  #for f in TWOS
  #for h in TWO
  var s_$r_$o_$f_$h = Held();
  #end
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
  #for q in STAGED
  for (var begin = 0u; begin * THREADS < pieces; begin += IN_CHUNK) {
    stage(i, begin, local);
    let stop = min(steps, begin + IN_CHUNK);
  #end
  #for q in DIRECT
  {
    let stop = steps;
  #end
  for (; step + UNROLL <= stop; step += UNROLL) {
    #for q in BEHIND
    #for u in UNROLL
    #for o in OUTPUTS
    let y_$u_$o = b_words[b_$o + (step + $uu) * THREADS];
    #end
    #end
    #end
    #for q in DIRECT
    #for u in UNROLL
    #for r in ROWS
    let x_$u_$r = a_words[a_$r + (step + $uu) * THREADS];
    #end
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
    #for f in TWOS
    #for q in STAGED
    #for r in ROWS
    let x_$u_$r_$f = staged[(($ru * IN_CHUNK + step - begin + $uu) * THREADS + thread) * TWOS + $fu];
    #end
    #end
    #for h in TWO
    #for o in OUTPUTS
    let v_$u_$o_$f_$h = held(y_$u_$o[2u * $fu + $hu]);
    #for g in GUARDS
    low_b_$o = lower(low_b_$o, v_$u_$o_$f_$h);
    #end
    #end
    #for r in ROWS
    #for q in STAGED
    let h_$u_$r_$f_$h = one_of_two(x_$u_$r_$f, $hu);
    #end
    #for q in DIRECT
    let h_$u_$r_$f_$h = held(x_$u_$r[2u * $fu + $hu]);
    #end
    #for g in GUARDS
    low_a_$r = lower(low_a_$r, h_$u_$r_$f_$h);
    #end
    #for o in OUTPUTS
    s_$r_$o_$f_$h = multiply_add_held(h_$u_$r_$f_$h, v_$u_$o_$f_$h, s_$r_$o_$f_$h);
    #end
    #end
    #end
    #end
    #end
  }
  for (; step < stop; step++) {
    #for o in OUTPUTS
    let y_$o = b_words[b_$o + step * THREADS];
    #end
    #for r in ROWS
    let x_$r = a_words[a_$r + step * THREADS];
    #for f in TWOS
    #for h in TWO
    #for g in GUARDS
    low_a_$r = lower(low_a_$r, held(x_$r[2u * $fu + $hu]));
    #end
    #for o in OUTPUTS
    #for g in GUARDS
    low_b_$o = lower(low_b_$o, held(y_$o[2u * $fu + $hu]));
    #end
    s_$r_$o_$f_$h = multiply_add_held(held(x_$r[2u * $fu + $hu]), held(y_$o[2u * $fu + $hu]), s_$r_$o_$f_$h);
    #end
    #end
    #end
    #end
  }
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
  #for f in TWOS
  #for h in TWO
  #for e in HELD
  sums[($ru * OUTPUTS + $ou) * LANES + (2u * $fu + $hu) * HELD + $eu] = one_of(s_$r_$o_$f_$h, $eu);
  #end
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
