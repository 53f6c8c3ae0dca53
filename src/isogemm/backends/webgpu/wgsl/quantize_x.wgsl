// Rows of x as 8-bit integers in blocks, as isogemm.contract.int32.quantize_activations has them: out holds four codes
// to a word, scales_out a float for each block. Quotients are rounded once, by integers: WGSL's division is not.
@group(0) @binding(4) var<storage, read_write> scales_out: array<f32>;

fn magnitude(x: f32) -> u32 {
  return bitcast<u32>(x) & 0x7fffffffu;
}

const WORDS = BLOCK / 4u;  // of a block: a thread has one
var<workgroup> greatest: array<u32, 64>;

fn product(x: f32, r: f32) -> f32 {
  if (magnitude(x) < 0x00800000u) {
    return fused(x, r, 0.0);  // what a device may take for zero
  }
  return rounded(x * r);
}

fn code_of(x: f32, r: f32) -> i32 {
  let y = product(x, r);
  if (BLOCK != 32u) {
    return i32(round(y));
  }
  let below = floor(abs(y));
  let code = i32(below) + select(0, 1, abs(y) - below >= 0.5);
  return select(code, -code, y < 0.0);
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let blocks = p.k / BLOCK;
  let block = min(id.x / WORDS, blocks - 1u);
  let begin = block * BLOCK + id.x % WORDS * 4u;
  var x: array<f32, 4>;
  var most = 0u;
  for (var e = 0u; e < 4u; e++) {
    x[e] = load_a(id.y, begin + e);
    most = max(most, magnitude(x[e]));
  }
  greatest[local] = most;
  workgroupBarrier();
  var largest = 0u;
  for (var w = 0u; w < WORDS; w++) {
    largest = max(largest, greatest[local / WORDS * WORDS + w]);
  }
  let finite = largest < 0x7f800000u;
  var d = 0.0;
  var r = 0.0;
  if (finite && largest > 0u) {
    let a = bitcast<f32>(largest);
    if (BLOCK == 32u) {
      d = divided(a, 127.0);
      if (magnitude(d) > 0u) {
        r = divided(1.0, d);
      }
    } else {
      r = divided(127.0, a);
    }
    if (magnitude(r) >= 0x7f800000u) {
      r = 0.0;
    }
    if (BLOCK == 256u && magnitude(r) > 0u) {
      d = divided(1.0, r);
    }
  }
  if (BLOCK == 32u) {
    d = widened(narrowed(bitcast<u32>(d)));
  }
  var packed = 0u;
  for (var e = 0u; e < 4u; e++) {
    packed |= select(0u, u32(code_of(x[e], r)) & 0xffu, finite) << (8u * e);
  }
  if (id.x < blocks * WORDS) {
    out_words[out_index(id.y, id.x)] = packed;
    if (id.x % WORDS == 0u) {
      scales_out[id.y * blocks + block] = select(bitcast<f32>(0x7fffffffu + p.zero), d, finite);
    }
  }
}
