// A tile of TILE_M x TILE_N outputs; each thread has REG_M x REG_N of them in named registers, in fours.
//
//     acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending
//
// As gemm_tiled, for operands that lie at whole vectors of words: a along K, b along K or, where ACROSS, along N. The
// next step's vectors are loaded before a step is computed and put into the other buffer after it, so that one barrier a
// step is enough; tiles are read in fours, which neighbouring threads find side by side. What is beyond M or N is read
// as the last and not stored; steps beyond K are left out. Where a number may be dropped (see guard), the sums of a tile
// are made by integers instead. Contract: chain.
const FOURS_M = TILE_M / 4u;
const FOURS_N = TILE_N / 4u;
const ACROSS_N = TILE_N / REG_N;  // threads side by side
const DOWN_M = TILE_M / REG_M;

var<workgroup> tile_a: array<vec4<f32>, BUFFERS * DEPTH * FOURS_M>;
var<workgroup> tile_b: array<vec4<f32>, BUFFERS * DEPTH * FOURS_N>;

// Vector e of a tile of `side` rows along K: its row and its place along K, in vectors.
fn row_of(e: u32, side: u32) -> u32 {
  return select(e / (DEPTH / EACH), e % side, SPREAD);
}

fn piece_of(e: u32, side: u32) -> u32 {
  return select(e % (DEPTH / EACH), e / side, SPREAD);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let i = group.y * TILE_M;
  let j = group.x * TILE_N;
  let tx = local % ACROSS_N;
  let ty = local / ACROSS_N;
  let pieces = p.k / EACH;
  #for l in LOADS_A
  let row_$l = row_of(local + $lu * WORKGROUP, TILE_M);
  let piece_a_$l = piece_of(local + $lu * WORKGROUP, TILE_M);
  let a_$l = u32(p.a_at + i32(min(i + row_$l, p.m - 1u)) * p.a_row) / EACH;
  let to_a_$l = piece_a_$l * EACH * FOURS_M + row_$l / 4u;
  #end
  #for l in LOADS_B
  let e_$l = local + $lu * WORKGROUP;
  let column_$l = select(row_of(e_$l, TILE_N), e_$l % (TILE_N / EACH), ACROSS);
  let piece_b_$l = select(piece_of(e_$l, TILE_N), e_$l / (TILE_N / EACH), ACROSS);
  let b_$l = select(u32(p.b_at + i32(min(j + column_$l, p.n - 1u)) * p.b_col) / EACH,
                    u32(p.b_at) / EACH + min(j / EACH + column_$l, p.n / EACH - 1u), ACROSS);
  let to_b_$l = select(piece_b_$l * EACH * FOURS_N + column_$l / 4u, piece_b_$l * FOURS_N + column_$l * (EACH / 4u), ACROSS);
  #end
  #for g in GROUPS
  #for c in FOUR
  #for q in FOURS
  var acc_$g_$c_$q = vec4<f32>();
  #end
  #end
  #end
  #for g in GUARDS
  var drops = false;
  #end
  if (p.start == 1u) {
    #for g in GROUPS
    #for c in FOUR
    #for q in FOURS
    acc_$g_$c_$q = begun(i + $gu * DOWN_M * 4u + ty * 4u + $cu, j + $qu * ACROSS_N * 4u + tx * 4u);
    #for h in GUARDS
    drops = drops || may_drop_start(acc_$g_$c_$q);
    #end
    #end
    #end
    #end
  }
  #for l in LOADS_A
  var x_$l = a_words[a_$l + min(piece_a_$l, pieces - 1u)];
  #end
  #for l in LOADS_B
  var y_$l = b_words[b_$l + select(min(piece_b_$l, pieces - 1u), min(piece_b_$l, p.k - 1u) * (u32(p.b_row) / EACH), ACROSS)];
  #end
  #for g in GUARDS
  var low_a = Low(0xffffffffu);
  var low_b = Low(0xffffffffu);
  #end
  var buffer = 0u;
  for (var at = 0u; at < p.k; at += DEPTH) {
    if (BUFFERS == 1u) {
      workgroupBarrier();
    }
    let base_a = buffer * DEPTH * FOURS_M;
    let base_b = buffer * DEPTH * FOURS_N;
    #for g in GUARDS
    #for w in WORDS
    #for l in LOADS_A
    low_a = lower(low_a, held(x_$l[$w]));
    #end
    #for l in LOADS_B
    low_b = lower(low_b, held(y_$l[$w]));
    #end
    #end
    #end
    #for l in LOADS_A
    #for w in WORDS
    #for h in HELD
    tile_a[base_a + to_a_$l + ($wu * HELD + $hu) * FOURS_M][row_$l % 4u] = one_of(held(x_$l[$w]), $hu);
    #end
    #end
    #end
    #for l in LOADS_B
    if (ACROSS) {
      #for f in QUADS
      tile_b[base_b + to_b_$l + $fu] = quad(y_$l, $fu);
      #end
    } else {
      #for w in WORDS
      #for h in HELD
      tile_b[base_b + to_b_$l + ($wu * HELD + $hu) * FOURS_N][column_$l % 4u] = one_of(held(y_$l[$w]), $hu);
      #end
      #end
    }
    #end
    workgroupBarrier();
    let next = at + DEPTH;
    if (next < p.k) {
      #for l in LOADS_A
      x_$l = a_words[a_$l + min(next / EACH + piece_a_$l, pieces - 1u)];
      #end
      #for l in LOADS_B
      y_$l = b_words[b_$l + select(min(next / EACH + piece_b_$l, pieces - 1u), min(next + piece_b_$l, p.k - 1u) * (u32(p.b_row) / EACH), ACROSS)];
      #end
    }
    let depth = min(DEPTH, p.k - at);  // a multiple of INNER
    for (var k = 0u; k < depth; k += INNER) {
      #for u in INNER
      #for g in GROUPS
      let l_$u_$g = tile_a[base_a + (k + $uu) * FOURS_M + $gu * DOWN_M + ty];
      #end
      #for q in FOURS
      let r_$u_$q = tile_b[base_b + (k + $uu) * FOURS_N + $qu * ACROSS_N + tx];
      #end
      #for g in GROUPS
      #for c in FOUR
      #for q in FOURS
      acc_$g_$c_$q = multiply_add_4(l_$u_$g[$c], r_$u_$q, acc_$g_$c_$q);
      #end
      #end
      #end
      #end
    }
    if (BUFFERS == 2u) {
      buffer = 1u - buffer;
    }
  }
  #for g in GUARDS
  if (chain_drops(drops, least(low_a), least(low_b), local)) {
    exact_chains(i, j, TILE_M, TILE_N, local);
    return;
  }
  #end
  #for g in GROUPS
  #for c in FOUR
  #for q in FOURS
  finished(i + $gu * DOWN_M * 4u + ty * 4u + $cu, j + $qu * ACROSS_N * 4u + tx * 4u, acc_$g_$c_$q);
  #end
  #end
  #end
}

fn multiply_add_4(x: f32, y: vec4<f32>, z: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(multiply_add(x, y.x, z.x), multiply_add(x, y.y, z.y), multiply_add(x, y.z, z.z), multiply_add(x, y.w, z.w));
}

fn begun(i: u32, j: u32) -> vec4<f32> {
  var found = vec4<f32>();
  if (i < p.m) {
    #for c in FOUR
    if (j + $cu < p.n) {
      found[$c] = first(i, j + $cu);
    }
    #end
  }
  return found;
}

fn finished(i: u32, j: u32, x: vec4<f32>) {
  if (i < p.m) {
    #for c in FOUR
    if (j + $cu < p.n) {
      store(i, j + $cu, x[$c]);
    }
    #end
  }
}

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
