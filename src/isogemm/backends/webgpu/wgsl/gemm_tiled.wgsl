// A tile of 64 x 64 outputs by 256 threads, 4 x 4 of them in the registers of each.
//
//     acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending, or in the order of the lanes
//
// Steps of K come through two buffers of workgroup memory: one is filled while the other is used. With STEP = 32 the
// walk goes lane by lane, in the order in which they meet, and waiting sums are kept in a stack: the bits of 32 lanes
// side by side. Mended: 256 threads load all 1024 elements of a tile, where the source's left half of 512 unloaded; and
// M, N and K have tails, whose steps are left out, not filled with zeros: -0 + 0 is not -0. Contract: chain or lanes32.
const SIDE = 64u;
const DEPTH = 16u;
const EACH = 4u;
const LEVELS = 5u;

var<workgroup> tile_a: array<array<f32, 1024>, 2>;
var<workgroup> tile_b: array<array<f32, 1024>, 2>;

// The first k of step q, of which a lane has `steps`: lanes in the order of their reversed bits.
fn begin(q: u32, steps: u32) -> u32 {
  let lane = select(0u, reverseBits(q / steps) >> 27u, STEP == 32u);
  return lane + (q % steps) * DEPTH * STEP;
}

fn fill(buffer: u32, at: u32, i: u32, j: u32, local: u32) {
  for (var e = local; e < SIDE * DEPTH; e += 256u) {
    let row = e / DEPTH;
    let k = at + (e % DEPTH) * STEP;
    var x = 0.0;
    if (i + row < p.m && k < p.k) {
      x = load_a(i + row, k);
    }
    tile_a[buffer][(e % DEPTH) * SIDE + row] = x;
  }
  for (var e = local; e < SIDE * DEPTH; e += 256u) {
    let column = select(e / DEPTH, e % SIDE, ACROSS);
    let depth = select(e % DEPTH, e / SIDE, ACROSS);
    let k = at + depth * STEP;
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
  let steps = max(1u, (p.k + STEP * DEPTH - 1u) / (STEP * DEPTH));
  let last = steps * STEP;
  var acc: array<f32, 16>;
  var waiting: array<array<f32, 16>, LEVELS>;
  for (var e = 0u; e < 16u; e++) {
    if (i + row + e / EACH < p.m && j + column + e % EACH < p.n) {
      acc[e] = first(i + row + e / EACH, j + column + e % EACH);
    }
  }
  fill(0u, begin(0u, steps), i, j, local);
  for (var q = 0u; q < last; q++) {
    workgroupBarrier();
    if (q + 1u < last) {
      fill((q + 1u) % 2u, begin(q + 1u, steps), i, j, local);
    }
    let at = begin(q, steps);
    let depth = min(DEPTH, (max(p.k, at) - at + STEP - 1u) / STEP);
    for (var k = 0u; k < depth; k++) {
      for (var r = 0u; r < EACH; r++) {
        let x = tile_a[q % 2u][k * SIDE + row + r];
        for (var c = 0u; c < EACH; c++) {
          acc[r * EACH + c] = multiply_add(x, tile_b[q % 2u][k * SIDE + column + c], acc[r * EACH + c]);
        }
      }
    }
    if (STEP == 32u && (q + 1u) % steps == 0u) {
      // A lane is done: it meets those that wait, as a counter carries. The last one carries through all levels.
      let lane = q / steps;
      for (var e = 0u; e < 16u; e++) {
        var sum = acc[e];
        var carries = true;
        for (var level = 0u; level < LEVELS; level++) {
          if (carries && ((lane >> level) & 1u) == 1u) {
            sum += waiting[level][e];
          } else if (carries) {
            waiting[level][e] = sum;
            carries = false;
          }
        }
        acc[e] = select(0.0, sum, q + 1u == last);
      }
    }
  }
  for (var e = 0u; e < 16u; e++) {
    if (i + row + e / EACH < p.m && j + column + e % EACH < p.n) {
      store(i + row + e / EACH, j + column + e % EACH, acc[e]);
    }
  }
}
