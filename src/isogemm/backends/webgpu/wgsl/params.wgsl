// What every product is told: out[i, j] = sum over k of a[i, k] * b[k, j]. Strides and offsets are counted in elements.
struct Params {
  m: u32,
  n: u32,
  k: u32,
  start: u32,  // 1: the walk over K starts from what out holds
  a_at: i32,
  a_row: i32,
  a_col: i32,
  b_at: i32,
  b_row: i32,
  b_col: i32,
  out_at: i32,
  out_row: i32,
  out_col: i32,
  zero: u32,  // 0, which no compiler knows: see rounded
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a_words: array<WordA>;
@group(0) @binding(2) var<storage, read> b_words: array<WordB>;
@group(0) @binding(3) var<storage, read_write> out_words: array<u32>;

// x, already rounded: a compiler may fuse or reorder float operations, but not across integers that it cannot foresee.
fn rounded(x: f32) -> f32 {
  return bitcast<f32>(bitcast<u32>(x) ^ p.zero);
}

fn out_index(i: u32, j: u32) -> u32 {
  return u32(p.out_at + i32(i) * p.out_row + i32(j) * p.out_col);
}

fn first(i: u32, j: u32) -> f32 {
  return select(0.0, bitcast<f32>(out_words[out_index(i, j)]), p.start == 1u);
}

// Every NaN is stored as the one of the contracts.
fn store(i: u32, j: u32, x: f32) {
  let bits = bitcast<u32>(x);
  out_words[out_index(i, j)] = select(bits, 0x7fffffffu, (bits & 0x7fffffffu) > 0x7f800000u);
}
