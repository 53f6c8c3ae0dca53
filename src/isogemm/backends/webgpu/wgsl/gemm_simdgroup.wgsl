// 8 x 8 fragments, as matrix units have them: 32 threads hold two elements each, and a step of K is 8.
//
//     acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending
//
// WGSL has no matrix units yet, so the fragments meet in workgroup memory. Mended: the accumulator is a float, which
// the source kept in half; and the map covers all eight rows, thread t having row t / 4 and columns 2 * (t % 4) and the
// next, where the source's covered four. A workgroup has 4 x 2 fragments. Contract: chain.
var<workgroup> left: array<f32, 256>;  // 32 rows of 8
var<workgroup> right: array<f32, 128>;  // 8 rows of 16

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let fragment = local / 32u;
  let thread = local % 32u;
  let row = (fragment / 2u) * 8u + thread / 4u;
  let column = (fragment % 2u) * 8u + 2u * (thread % 4u);
  let i = group.y * 32u;
  let j = group.x * 16u;
  var acc: array<f32, 2>;
  for (var c = 0u; c < 2u; c++) {
    if (i + row < p.m && j + column + c < p.n) {
      acc[c] = first(i + row, j + column + c);
    }
  }
  for (var k = 0u; k < p.k; k += 8u) {
    workgroupBarrier();
    if (i + local / 8u < p.m && k + local % 8u < p.k) {
      left[local] = load_a(i + local / 8u, k + local % 8u);
    }
    if (local < 128u && j + local % 16u < p.n && k + local / 16u < p.k) {
      right[local] = load_b(k + local / 16u, j + local % 16u);
    }
    workgroupBarrier();
    for (var step = 0u; step < min(8u, p.k - k); step++) {
      for (var c = 0u; c < 2u; c++) {
        acc[c] = multiply_add(left[row * 8u + step], right[step * 16u + column + c], acc[c]);
      }
    }
  }
  for (var c = 0u; c < 2u; c++) {
    if (i + row < p.m && j + column + c < p.n) {
      store(i + row, j + column + c, acc[c]);
    }
  }
}
