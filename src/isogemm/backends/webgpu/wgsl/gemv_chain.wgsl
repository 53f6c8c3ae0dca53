// As gemv_naive, for rows that lie along K at whole vectors of words: all threads load, and COLUMNS of them add.
//
//     acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending
//
// Neighbouring threads load neighbouring vectors of a row of b, PIECES of each row at once, and put them into workgroup
// memory, from which one thread to a column walks; meanwhile the next are loaded. Rows and columns beyond the last are
// read as the last and not stored. Where a number may be dropped (see guard), sums are made by integers instead.
// Contract: chain.
const LINE = PIECES * WORDS + 1u;  // words of a column: threads side by side read different banks
const ELEMENTS = PIECES * EACH;

var<workgroup> words: array<u32, 2u * COLUMNS * LINE>;
var<workgroup> xs: array<f32, 2u * ROWS * ELEMENTS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let i = group.y * ROWS;
  let j = group.x * COLUMNS;
  let pieces = p.k / EACH;
  let piece = local % PIECES;
  let side = local / PIECES;
  let walker = local < COLUMNS;
  let row_of_x = u32(p.a_at + i32(min(i + min(side, ROWS - 1u), p.m - 1u)) * p.a_row) / EACH;
  #for l in LOADS
  let column_$l = side + $lu * (WORKGROUP / PIECES);
  let b_$l = u32(p.b_at + i32(min(j + column_$l, p.n - 1u)) * p.b_col) / EACH;
  var y_$l = b_words[b_$l + min(piece, pieces - 1u)];
  #end
  var x = a_words[row_of_x + min(piece, pieces - 1u)];
  #for g in GUARDS
  var low_a = Low(0xffffffffu);
  var low_b = Low(0xffffffffu);
  var drops = false;
  #end
  #for r in ROWS
  var acc_$r = 0.0;
  if (p.start == 1u && walker && i + $ru < p.m && j + local < p.n) {
    acc_$r = first(i + $ru, j + local);
    #for g in GUARDS
    drops = drops || may_drop_start(vec4<f32>(acc_$r));
    #end
  }
  #end
  var buffer = 0u;
  for (var at = 0u; at < pieces; at += PIECES) {
    #for w in WORDS
    #for l in LOADS
    words[(buffer * COLUMNS + column_$l) * LINE + piece * WORDS + $wu] = y_$l[$w];
    #for g in GUARDS
    low_b = lower(low_b, held(y_$l[$w]));
    #end
    #end
    #for g in GUARDS
    low_a = lower(low_a, held(x[$w]));
    #end
    if (side < ROWS) {
      #for h in HELD
      xs[(buffer * ROWS + side) * ELEMENTS + piece * EACH + $wu * HELD + $hu] = one_of(held(x[$w]), $hu);
      #end
    }
    #end
    workgroupBarrier();
    let next = min(at + PIECES + piece, pieces - 1u);
    #for l in LOADS
    y_$l = b_words[b_$l + next];
    #end
    x = a_words[row_of_x + next];
    if (walker) {
      let line = (buffer * COLUMNS + local) * LINE;
      let many = min(PIECES, pieces - at) * WORDS;
      for (var q = 0u; q < many; q += WORDS) {
        #for w in WORDS
        let v_$w = held(words[line + q + $wu]);
        #end
        #for r in ROWS
        #for w in WORDS
        #for h in HELD
        acc_$r = multiply_add(xs[(buffer * ROWS + $ru) * ELEMENTS + (q + $wu) * HELD + $hu], one_of(v_$w, $hu), acc_$r);
        #end
        #end
        #end
      }
    }
    buffer = 1u - buffer;
  }
  #for g in GUARDS
  if (chain_drops(drops, least(low_a), least(low_b), local)) {
    exact_chains(i, j, ROWS, COLUMNS, local);
    return;
  }
  #end
  #for r in ROWS
  if (walker && i + $ru < p.m && j + local < p.n) {
    store(i + $ru, j + local, acc_$r);
  }
  #end
}
