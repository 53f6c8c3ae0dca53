// As gemv_simd, with OUTPUTS columns to a group: what a thread reads of x serves all of them.
//
// Mended: the last group has fewer columns where OUTPUTS does not divide N. Contract: lanes32.
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let thread = local % THREADS;
  let i = group.y;
  let j = (group.x * (WORKGROUP / THREADS) + local / THREADS) * OUTPUTS;
  let count = min(OUTPUTS, max(p.n, j) - j);
  var lanes: array<array<f32, LANES>, OUTPUTS>;
  for (var k = thread * LANES; k < p.k; k += 32u) {
    for (var l = 0u; l < min(LANES, p.k - k); l++) {
      let x = load_a(i, k + l);
      for (var o = 0u; o < count; o++) {
        lanes[o][l] = multiply_add(x, load_b(k + l, j + o), lanes[o][l]);
      }
    }
  }
  for (var o = 0u; o < OUTPUTS; o++) {
    let sum = meet(lanes[o], local);
    if (thread == 0u && o < count) {
      store(i, j + o, sum);
    }
  }
}
