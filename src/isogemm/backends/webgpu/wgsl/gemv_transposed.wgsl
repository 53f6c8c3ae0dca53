// b stored [k, n]: neighbouring threads read neighbouring columns, and share x through workgroup memory.
//
//     acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending
//
// Mended: x is staged in pieces, so K has any length. Contract: chain.
const PIECE = 256u;

var<workgroup> x: array<f32, PIECE>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let i = group.y;
  let j = group.x * 64u + local;
  var acc = 0.0;
  if (j < p.n) {
    acc = first(i, j);
  }
  for (var begin = 0u; begin < p.k; begin += PIECE) {
    let length = min(PIECE, p.k - begin);
    workgroupBarrier();
    for (var k = local; k < length; k += 64u) {
      x[k] = load_a(i, begin + k);
    }
    workgroupBarrier();
    if (j < p.n) {
      for (var k = 0u; k < length; k++) {
        acc = multiply_add(x[k], load_b(begin + k, j), acc);
      }
    }
  }
  if (j < p.n) {
    store(i, j, acc);
  }
}
