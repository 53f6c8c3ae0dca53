// As gemv_simd, with ROWS rows of x to a group: a weight is read once for all of them.
//
// Mended: rows beyond ROWS belong to further workgroups, where the source's sums[8] overflowed for M > 8.
// Contract: lanes32.
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let thread = local % THREADS;
  let i = group.y * ROWS;
  let j = group.x * (WORKGROUP / THREADS) + local / THREADS;
  let count = min(ROWS, p.m - i);
  var lanes: array<array<f32, LANES>, ROWS>;
  if (j < p.n) {
    for (var k = thread * LANES; k < p.k; k += 32u) {
      for (var l = 0u; l < min(LANES, p.k - k); l++) {
        let w = load_b(k + l, j);
        for (var r = 0u; r < count; r++) {
          lanes[r][l] = multiply_add(load_a(i + r, k + l), w, lanes[r][l]);
        }
      }
    }
  }
  for (var r = 0u; r < ROWS; r++) {
    let sum = meet(lanes[r], local);
    if (thread == 0u && j < p.n && r < count) {
      store(i + r, j, sum);
    }
  }
}
