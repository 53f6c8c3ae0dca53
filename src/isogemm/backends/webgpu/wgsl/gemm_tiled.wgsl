// A tile of 64 x 64 outputs by 256 threads, 4 x 4 of them in the registers of each.
//
//     acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending
//
// Steps of K come through two buffers of workgroup memory: one is filled while the other is used. Mended: 256 threads
// load all 1024 elements of a tile, where the source's left half of 512 unloaded; and M, N and K have tails, whose steps
// are left out, not filled with zeros: -0 + 0 is not -0. Contract: chain.
const SIDE = 64u;
const DEPTH = 16u;
const EACH = 4u;

var<workgroup> tile_a: array<array<f32, 1024>, 2>;
var<workgroup> tile_b: array<array<f32, 1024>, 2>;

fn fill(buffer: u32, at: u32, i: u32, j: u32, local: u32) {
  for (var e = local; e < SIDE * DEPTH; e += 256u) {
    let row = e / DEPTH;
    let k = at + e % DEPTH;
    var x = 0.0;
    if (i + row < p.m && k < p.k) {
      x = load_a(i + row, k);
    }
    tile_a[buffer][(e % DEPTH) * SIDE + row] = x;
  }
  for (var e = local; e < SIDE * DEPTH; e += 256u) {
    let column = select(e / DEPTH, e % SIDE, ACROSS);
    let depth = select(e % DEPTH, e / SIDE, ACROSS);
    let k = at + depth;
    var x = 0.0;
    if (j + column < p.n && k < p.k) {
      x = load_b(k, j + column);
    }
    tile_b[buffer][depth * SIDE + column] = x;
  }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let i = group.y * SIDE;
  let j = group.x * SIDE;
  let row = (local / 16u) * EACH;
  let column = (local % 16u) * EACH;
  let steps = max(1u, (p.k + DEPTH - 1u) / DEPTH);
  var acc: array<f32, 16>;
  for (var e = 0u; e < 16u; e++) {
    if (i + row + e / EACH < p.m && j + column + e % EACH < p.n) {
      acc[e] = first(i + row + e / EACH, j + column + e % EACH);
    }
  }
  fill(0u, 0u, i, j, local);
  for (var q = 0u; q < steps; q++) {
    workgroupBarrier();
    if (q + 1u < steps) {
      fill((q + 1u) % 2u, (q + 1u) * DEPTH, i, j, local);
    }
    let depth = min(DEPTH, p.k - q * DEPTH);
    for (var k = 0u; k < depth; k++) {
      for (var r = 0u; r < EACH; r++) {
        let x = tile_a[q % 2u][k * SIDE + row + r];
        for (var c = 0u; c < EACH; c++) {
          acc[r * EACH + c] = multiply_add(x, tile_b[q % 2u][k * SIDE + column + c], acc[r * EACH + c]);
        }
      }
    }
  }
  for (var e = 0u; e < 16u; e++) {
    if (i + row + e / EACH < p.m && j + column + e % EACH < p.n) {
      store(i + row + e / EACH, j + column + e % EACH, acc[e]);
    }
  }
}
