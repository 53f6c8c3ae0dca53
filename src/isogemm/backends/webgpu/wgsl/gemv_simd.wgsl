// A group of THREADS threads walks K for one output; a thread has LANES of the 32 lanes, adjacent ones.
//
//     lane[l] = fma(a[i, k], b[k, j], lane[l])        k = l, l + 32, l + 64, ...
//
// and the lanes meet by XOR, 16 first (see meet). Mended: the sum is complete on subgroups of any size, because the
// lanes are the contract's 32 and not the hardware's; and K has a tail. Contract: lanes32.
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let thread = local % THREADS;
  let i = group.y;
  let j = group.x * (WORKGROUP / THREADS) + local / THREADS;
  var lanes: array<f32, LANES>;
  if (j < p.n) {
    for (var k = thread * LANES; k < p.k; k += 32u) {
      for (var l = 0u; l < min(LANES, p.k - k); l++) {
        lanes[l] = multiply_add(load_a(i, k + l), load_b(k + l, j), lanes[l]);
      }
    }
  }
  let sum = meet(lanes, local);
  if (thread == 0u && j < p.n) {
    store(i, j, sum);
  }
}
