// Devices may drop numbers below 2^-126, as operands and as results, where the definition keeps them. Where the least
// nonzero numbers of a sum's operands are at least 2^s and 2^t, all products are multiples of 2^(s + t - 46), and so is
// every sum on the way, rounded or not: with s and t of at least -126, and s + t of at least -80, nothing can be dropped.
// Low holds the least magnitude that was seen, shifted up by a bit and less one, which puts zero last; the top eight
// bits are an exponent, perhaps one too low.
var<workgroup> dropping: atomic<u32>;
var<workgroup> exactly: u32;

fn may_drop(low_a: u32, low_b: u32) -> bool {
  let s = low_a >> 24u;
  let t = low_b >> 24u;
  return min(s, t) == 0u || s + t < 174u;
}

// Where sums begin: multiples of 2^-126.
fn may_drop_start(x: vec4<f32>) -> bool {
  let magnitude = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
  return any((magnitude != vec4<u32>()) & (magnitude < vec4<u32>(0x0c000000u)));
}

// Whether a thread of the workgroup has seen that something may be dropped.
fn any_drops(drops: bool, local: u32) -> bool {
  if (local == 0u) {
    atomicStore(&dropping, 0u);  // wgpu does not promise that it begins so
  }
  workgroupBarrier();
  if (drops) {
    atomicStore(&dropping, 1u);
  }
  workgroupBarrier();
  if (local == 0u) {
    exactly = atomicLoad(&dropping);
  }
  return workgroupUniformLoad(&exactly) == 1u;
}
