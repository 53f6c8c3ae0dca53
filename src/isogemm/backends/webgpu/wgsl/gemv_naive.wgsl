// One thread walks all of K for one output.
//
//     acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending
//
// Strides are free. Contract: chain.
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.y;
  let j = id.x;
  if (j >= p.n) {
    return;
  }
  var acc = first(i, j);
  for (var k = 0u; k < p.k; k++) {
    acc = multiply_add(load_a(i, k), load_b(k, j), acc);
  }
  store(i, j, acc);
}
