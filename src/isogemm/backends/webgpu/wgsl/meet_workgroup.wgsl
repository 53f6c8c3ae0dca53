// The sum of 32 lanes by XOR: lane l meets l ^ 16, then l ^ 8, ^ 4, ^ 2, ^ 1. Lanes of other threads come through
// workgroup memory: for devices without subgroups, or with smaller ones than a group.
var<workgroup> room: array<array<f32, LANES>, WORKGROUP>;

fn meet(given: array<f32, LANES>, local: u32) -> f32 {
  var lanes = given;
  for (var mask = THREADS / 2u; mask > 0u; mask >>= 1u) {  // order-critical: the largest first
    workgroupBarrier();
    room[local] = lanes;
    workgroupBarrier();
    for (var l = 0u; l < LANES; l++) {
      lanes[l] = added(lanes[l], room[local ^ mask][l]);
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
  workgroupBarrier();
  room[local][0] = x;
  workgroupBarrier();
  return room[local ^ mask][0];
}
