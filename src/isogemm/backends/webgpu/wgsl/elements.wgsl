// One rounding for each element: out = x, s * x, or x + y; then rounded to out's type. What follows the walk over K is
// made of such steps, so that no compiler can fuse two of them.
struct Elements {
  m: u32,
  n: u32,
  x_at: i32,
  x_row: i32,
  x_col: i32,
  y_at: i32,
  y_row: i32,
  y_col: i32,
  out_at: i32,
  out_row: i32,
  out_col: i32,
  scale: f32,
  zero: u32,
}

@group(0) @binding(0) var<uniform> p: Elements;
@group(0) @binding(1) var<storage, read> a_words: array<u32>;
@group(0) @binding(2) var<storage, read> b_words: array<u32>;
@group(0) @binding(3) var<storage, read_write> out_words: array<OUT_WORD>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.y;
  let j = id.x;
  if (j >= p.n) {
    return;
  }
  let x = element_a(u32(p.x_at + i32(i) * p.x_row + i32(j) * p.x_col));
  let y = element_b(u32(p.y_at + i32(i) * p.y_row + i32(j) * p.y_col));
  let bits = bitcast<u32>(OPERATION);
  write(u32(p.out_at + i32(i) * p.out_row + i32(j) * p.out_col), bits);
}
