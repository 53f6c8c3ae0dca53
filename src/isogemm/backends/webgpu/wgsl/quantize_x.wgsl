// Rows of x as 8-bit integers in blocks, as isogemm.contract.int32.quantize_activations has them: out holds four codes
// to a word, scales_out a float for each block. Quotients are rounded once, by integers: WGSL's division is not.
@group(0) @binding(4) var<storage, read_write> scales_out: array<f32>;

fn magnitude(x: f32) -> u32 {
  return bitcast<u32>(x) & 0x7fffffffu;
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let blocks = p.k / BLOCK;
  if (id.x >= blocks) {
    return;
  }
  let begin = id.x * BLOCK;
  var largest = 0u;
  for (var e = 0u; e < BLOCK; e++) {
    largest = max(largest, magnitude(load_a(id.y, begin + e)));
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
  scales_out[id.y * blocks + id.x] = select(bitcast<f32>(0x7fffffffu + p.zero), d, finite);
  for (var word = 0u; word < BLOCK / 4u; word++) {
    var packed = 0u;
    for (var e = 0u; e < 4u; e++) {
      let y = rounded(load_a(id.y, begin + 4u * word + e) * r);
      var code = 0;
      if (finite) {
        if (BLOCK == 32u) {
          let below = floor(abs(y));
          code = i32(below) + select(0, 1, abs(y) - below >= 0.5);
          code = select(code, -code, y < 0.0);
        } else {
          code = i32(round(y));
        }
      }
      packed |= (u32(code) & 0xffu) << (8u * e);
    }
    out_words[out_index(id.y, id.x * (BLOCK / 4u) + word)] = packed;
  }
}
