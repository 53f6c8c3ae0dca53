// The sum of 32 lanes by XOR: lane l meets l ^ 16, then l ^ 8, ^ 4, ^ 2, ^ 1. Lanes of other threads come by shuffles,
// for which the threads of a group must lie in one subgroup.
fn meet(given: array<f32, LANES>, local: u32) -> f32 {
  var lanes = given;
  for (var mask = THREADS / 2u; mask > 0u; mask >>= 1u) {  // order-critical: the largest first
    for (var l = 0u; l < LANES; l++) {
      lanes[l] = added(lanes[l], subgroupShuffleXor(lanes[l], mask));
    }
  }
  for (var mask = LANES / 2u; mask > 0u; mask >>= 1u) {
    for (var l = 0u; l < mask; l++) {
      lanes[l] = added(lanes[l], lanes[l + mask]);
    }
  }
  return lanes[0];
}

// The number of the thread that a thread meets.
fn other(x: f32, mask: u32, local: u32) -> f32 {
  return subgroupShuffleXor(x, mask);
}
