// Products of 8-bit activations and quantized weights, whose integers are exact; for Q4_0, Q8_0, Q4_K and Q6_K.
//
//     S = sum of s * q * a over a block,  T = sum of t * a
//     acc = fma(float(S), d_w * d_x, acc);  acc = fma(float(T), o_w * d_x, acc) where the format has an offset
//
// blocks ascending. 64 threads take 8 columns times 8 blocks, then one thread to an output walks the 8 sums. The bits
// are those of isogemm.contract.int32 on every device: integers have one sum. Contract: int32/chain.
const OUTPUTS = 8u;
const BLOCKS = 8u;

@group(0) @binding(4) var<storage, read> a_scales: array<f32>;

struct Term {
  sum: f32,
  factor: f32,
  offset_sum: f32,
  offset_factor: f32,
}

var<workgroup> terms: array<Term, 64 * ROWS>;

fn exactly_rounded(x: i32) -> f32 {
  if (x == 0) {
    return 0.0;
  }
  return together(Wide(0u, u32(abs(x))), 0, select(0u, 0x80000000u, x < 0));
}

fn term(block: u32, i: u32, at: u32) -> Term {
  let x = u32(p.a_at + i32(i) * p.a_row) + block * (BLOCK / 4u);
  var s = 0;
  var t = 0;
  for (var sub = 0u; sub < BLOCK / SUB; sub++) {
    var dot = 0;
    var total = 0;
    for (var g = sub * (SUB / 4u); g < (sub + 1u) * (SUB / 4u); g++) {
      let a = a_words[x + g];
      dot += dot4I8Packed(codes(at, g), a);
      total += dot4I8Packed(0x01010101u, a);
    }
    s += scale_of(at, sub) * (dot - ZERO * total);
    t += min_of(at, sub) * total;
  }
  let d = a_scales[i * (p.k * 4u / BLOCK) + block];
  var found = Term(exactly_rounded(s), rounded(d_of(at) * d), 0.0, 0.0);
  if (OFFSET) {
    found.offset_sum = exactly_rounded(t);
    found.offset_factor = rounded(offset_of(at) * d);
  }
  return found;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let i = group.y * ROWS;
  let j = group.x * OUTPUTS;
  let rows = min(ROWS, p.m - i);
  let blocks = p.k * 4u / BLOCK;
  let walker = local < OUTPUTS * rows && j + local % OUTPUTS < p.n;
  var acc = 0.0;
  for (var begin = 0u; begin < blocks; begin += BLOCKS) {
    let block = begin + local % BLOCKS;
    let column = j + local / BLOCKS;
    workgroupBarrier();
    if (block < blocks && column < p.n) {
      let at = block_at(block, column);
      for (var r = 0u; r < rows; r++) {
        terms[r * 64u + local] = term(block, i + r, at);
      }
    }
    workgroupBarrier();
    if (walker) {
      for (var b = 0u; b < min(BLOCKS, blocks - begin); b++) {
        let next = terms[(local / OUTPUTS) * 64u + (local % OUTPUTS) * BLOCKS + b];
        acc = multiply_add(next.sum, next.factor, acc);
        if (OFFSET) {
          acc = multiply_add(next.offset_sum, next.offset_factor, acc);
        }
      }
    }
  }
  if (walker) {
    store(i + local / OUTPUTS, j + local % OUTPUTS, acc);
  }
}
