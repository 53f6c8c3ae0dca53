// Whether sums of a workgroup may drop a number, by the least numbers that each of its threads has seen: those of one
// thread meet those of the others.
var<workgroup> greatest_a: atomic<u32>;  // ~Low
var<workgroup> greatest_b: atomic<u32>;

fn chain_drops(drops: bool, low_a: u32, low_b: u32, local: u32) -> bool {
  if (local == 0u) {
    atomicStore(&greatest_a, 0u);
    atomicStore(&greatest_b, 0u);
  }
  workgroupBarrier();
  atomicMax(&greatest_a, ~low_a);
  atomicMax(&greatest_b, ~low_b);
  workgroupBarrier();
  return any_drops(drops || may_drop(~atomicLoad(&greatest_a), ~atomicLoad(&greatest_b)), local);
}

// All outputs of a tile by integers.
fn exact_chains(i: u32, j: u32, rows: u32, columns: u32, local: u32) {
  for (var e = local; e < rows * columns; e += WORKGROUP) {
    let row = i + e / columns;
    let column = j + e % columns;
    if (row < p.m && column < p.n) {
      var acc = first(row, column);
      for (var k = 0u; k < p.k; k++) {
        acc = fused(load_a(row, k), load_b(k, column), acc);
      }
      store(row, column, acc);
    }
  }
}
