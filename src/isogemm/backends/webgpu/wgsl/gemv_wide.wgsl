// As gemv_simd_multi, for many columns (a vocabulary): x is staged in workgroup memory for all groups of a workgroup.
//
// Mended: x is staged in pieces, where one array of 4096 held the source to K <= 4096; and the workgroups are as many as
// the columns need, where the source counted threads for outputs and left 31 of 32 unwritten. Contract: lanes32.
const PIECE = 1024u;  // a multiple of 32, so that every piece begins with lane 0

var<workgroup> x: array<f32, PIECE>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let thread = local % THREADS;
  let i = group.y;
  let j = (group.x * (WORKGROUP / THREADS) + local / THREADS) * OUTPUTS;
  let count = min(OUTPUTS, max(p.n, j) - j);
  var lanes: array<array<f32, LANES>, OUTPUTS>;
  for (var begin = 0u; begin < p.k; begin += PIECE) {
    let length = min(PIECE, p.k - begin);
    workgroupBarrier();
    for (var k = local; k < length; k += WORKGROUP) {
      x[k] = load_a(i, begin + k);
    }
    workgroupBarrier();
    for (var k = thread * LANES; k < length; k += 32u) {
      for (var l = 0u; l < min(LANES, length - k); l++) {
        for (var o = 0u; o < count; o++) {
          lanes[o][l] = multiply_add(x[k + l], load_b(begin + k + l, j + o), lanes[o][l]);
        }
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
