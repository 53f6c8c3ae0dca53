// out[i, j] = x[i, j], bits as they are: words of 32 or of 16 bits at any strides.
struct Copy {
  m: u32,
  n: u32,
  x_at: i32,
  x_row: i32,
  x_col: i32,
  out_at: i32,
  out_row: i32,
  out_col: i32,
}

@group(0) @binding(0) var<uniform> p: Copy;
@group(0) @binding(1) var<storage, read> x_words: array<u32>;
@group(0) @binding(2) var<storage, read_write> out_words: array<OUT_WORD>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < p.n) {
    let source_at = u32(p.x_at + i32(id.y) * p.x_row + i32(id.x) * p.x_col);
    write(u32(p.out_at + i32(id.y) * p.out_row + i32(id.x) * p.out_col), WORD);
  }
}
