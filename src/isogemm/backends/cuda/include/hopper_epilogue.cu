// From accumulators to the output: alpha, C, bias, one rounding, 16-byte stores.
//
// A thread of a warpgroup holds, of a block of 64 rows, rows r = 16 * warp + lane / 4 + 8 * h and columns
// c = 8 * j + 2 * (lane % 4) + e in element 4 * j + 2 * h + e.

struct Epilogue {
  u8* out;
  const void *c, *bias;
  i64 out_ld, out_batch, c_row, c_col, c_batch, bias_step;
  int rows, cols;
  float alpha, beta;
  int first_row = 0, first_col = 0;  // of what a tile stores: one that is walked further back has others before them
  u8* pieces = nullptr;              // of shared memory, TURNED bytes: see `store_half_columns`
  __device__ __forceinline__ bool row(int r) const { return r >= first_row && r < rows; }
  __device__ __forceinline__ bool col(int c) const { return c >= first_col && c < cols; }
};
struct Tile { int row, col, item; };

constexpr int OUT_BYTES = OUT == 0 ? 4 : 2;
constexpr int PIECE = 2048, PIECES = BN > 32 ? 2 : 1;  // of a warpgroup
constexpr int TURNED = COLUMNS && OUT != 0 ? WARPGROUPS * PIECES * PIECE : 0;

template <int KIND> DEVICE float load_value(const void* p, i64 i) {  // 0 float32, 1 bf16, 2 fp16
  if (KIND == 0) return ((const float*)p)[i];
  const u16 h = ((const u16*)p)[i];
  return KIND == 1 ? __uint_as_float((u32)h << 16) : f16_to_float(h);
}

// Elements i and i + 1 of the float32 C under a thread's accumulators, zero outside of it: where a walk starts that
// accumulates. `row` and `col` are the thread's first.
DEVICE float2 load_c(const Epilogue& e, int i, int row, int col, int item) {
  const int r = row + 8 * ((i >> 1) & 1), k = col + 8 * (i >> 2);
  const float* at = (const float*)e.c + item * e.c_batch + r * e.c_row + k * e.c_col;
  const bool inside = r < e.rows;
  if (inside && e.c_col == 1 && !((u64)at & 7) && k + 1 < e.cols) return *(const float2*)at;
  return make_float2(inside && k < e.cols ? *at : 0.0f, inside && k + 1 < e.cols ? at[e.c_col] : 0.0f);
}

// v = acc; v = alpha * v; v = v + beta * C; v = v + bias: each step rounds, nothing is fused.
DEVICE float finish(const Epilogue& e, float v, float c, float bias) {
  if (e.alpha != 1.0f) v = __fmul_rn(e.alpha, v);
#if C_KIND >= 0 && !ACCUMULATE
  v = __fadd_rn(v, e.beta == 1.0f ? c : __fmul_rn(e.beta, c));
#endif
#if BIAS_KIND >= 0
  v = __fadd_rn(v, bias);
#endif
  return v;
}

DEVICE float load_addend(const Epilogue& e, int row, int col, int item) {
#if C_KIND >= 0 && !ACCUMULATE
  return load_value<C_KIND>(e.c, item * e.c_batch + row * e.c_row + col * e.c_col);
#else
  return 0.0f;
#endif
}
DEVICE float load_bias(const Epilogue& e, int i) {
#if BIAS_KIND >= 0
  return load_value<BIAS_KIND>(e.bias, i * e.bias_step);
#else
  return 0.0f;
#endif
}

DEVICE float traded(float x, u32 from) {
#if BIAS_KIND >= 0
  return __shfl_sync(~0u, x, from);
#else
  return 0.0f;
#endif
}

// What a lane holds of a block's bias: that of its two rows, or of columns, side by side in a warp, which its lanes trade:
// loaded where it is added, it took the registers that two blocks of accumulators leave, and their walk spilled. A walk
// that leaves registers asks for it beforehand: 2 to 9 % of products of few microseconds (H200).
struct Bias { float v[BIAS_KIND < 0 || BIAS_ROWS ? 2 : (BN + 31) / 32]; };
DEVICE Bias bias_of(const Epilogue& e, int row0, int col0, u32 thread) {
  const int lane = thread & 31, row = row0 + 16 * ((thread >> 5) & 3) + (lane >> 2);
  Bias b;
#pragma unroll
  for (int i = 0; i < sizeof(b) / 4; ++i)
    b.v[i] = load_bias(e, BIAS_ROWS ? min(row + 8 * i, e.rows - 1) : min(col0 + 32 * i + lane, e.cols - 1));
  return b;
}

// `finish` on all of a thread's values. Those outside of the output take what its last row and column read: loads that no
// branch guards are issued together (behind one each, a bias took 25 us of a product's 60 on an H200).
DEVICE void finish_block(const Epilogue& e, float (&v)[BN / 2], const Bias& bias, int row, int col, int item, u32 lane) {
  const int r[2] = {min(row, e.rows - 1), min(row + 8, e.rows - 1)};
  int pair = col + 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < BN / 4; ++j) {
    const int from = 8 * (j >> 1) + (j & 1), c = min(pair + from, e.cols - 1), i = 4 * (j >> 1) + (j & 1);
    const float of_col = BIAS_ROWS ? 0.0f : traded(bias.v[from / 32 % (sizeof(bias) / 4)], from % 32 + 2 * (lane & 3));
#pragma unroll
    for (int h = 0; h < 2; ++h)
      v[i + 2 * h] = finish(e, v[i + 2 * h], load_addend(e, r[h], c, item), BIAS_ROWS ? bias.v[h] : of_col);
    if (j % 4 == 3) asm volatile("" : "+r"(pair)::"memory");  // no more at once than registers are left for
  }
}

DEVICE u32 pack(float x, float y) { return OUT == 1 ? pack_bf16(x, y) : pack_f16(x, y); }
DEVICE void store_words(u8* to, const u32 (&w)[4], int left) {  // 8 values of 2 bytes, `left` of them inside
  if (left >= 8) {
    *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < left) ((u16*)to)[i] = (u16)(w[i >> 1] >> (16 * (i & 1)));
  }
}
DEVICE void store_word(u8* to, u32 w, int left) {  // 2 values of 2 bytes
  if (VECTOR && left >= 2) {
    *(u32*)to = w;
  } else {
    if (left > 0) ((u16*)to)[0] = (u16)w;
    if (left > 1) ((u16*)to)[1] = (u16)(w >> 16);
  }
}

// Output of 2 bytes, columns contiguous.
DEVICE void store_half_rows(const Epilogue& e, u8* out, float (&v)[BN / 2], int row, int col, u32 lane) {
  const int q = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    u8* line = out + 2 * (r * e.out_ld);
#pragma unroll
    for (int j = 0; j < BN / 8; j += 4) {
      if (VECTOR && j + 4 <= BN / 8) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack(v[(4 * (j + i) + 2 * h) % (BN / 2)], v[(4 * (j + i) + 2 * h + 1) % (BN / 2)]);
        transpose_quad(w, lane);
        const int c = col + 8 * (j + q);
        if (e.row(r) && c >= e.first_col) store_words(line + 2 * c, w, e.cols - c);
      } else {
#pragma unroll
        for (int i = j; i < j + 4 && i < BN / 8; ++i) {
          const int c = col + 8 * i + 2 * q;
          if (e.row(r) && c >= e.first_col) store_word(line + 2 * c, pack(v[4 * i + 2 * h], v[4 * i + 2 * h + 1]), e.cols - c);
        }
      }
    }
  }
}

// Output of 2 bytes, rows contiguous. Sixteen columns at a time are turned in shared memory, where the warps that store
// TOGETHER lay their rows beside one another, and leave as whole lines: a warpgroup's or, with WARPS_APART, each warp's own.
// Of two pieces of shared memory one is written while the other is read, so that the warps meet once for each; few columns
// have one.
#ifdef WARPS_APART
constexpr int TOGETHER = 1;
DEVICE void meet_to_store() { __syncwarp(); }
#else
constexpr int TOGETHER = 4;
DEVICE void meet_to_store() { asm volatile("bar.sync %0, 128;" ::"r"(4 + (threadIdx.x >> 7)) : "memory"); }
#endif
constexpr int CHUNKS = 2 * TOGETHER;  // of 8 rows, in a line
// Where a column's chunk lies in a piece: eight that are written, or read, at once are in different banks.
DEVICE u32 turned(u32 column, u32 chunk) { return 16 * (CHUNKS * column + (chunk ^ column * TOGETHER / 4 % CHUNKS)); }

DEVICE void store_half_columns(const Epilogue& e, u8* out, float (&v)[BN / 2], int row0, int col0, u32 warp, u32 lane) {
  const u32 of_line = warp % TOGETHER, thread = 32 * of_line + lane;
  const int first = row0 + 16 * (warp - of_line);
  u8* const pieces = e.pieces + (threadIdx.x >> 7) * (PIECES * PIECE) + warp / TOGETHER * (512 * TOGETHER);
  const u32 to = turned(8 * (lane >> 4) + (lane & 7), 2 * of_line + (lane >> 3 & 1));
  // What a thread takes of a piece: a chunk or, where lines are no whole stores, every other line's value, beside its neighbours'.
  const u32 line = thread / (VECTOR ? CHUNKS : 8 * CHUNKS), in_line = thread % (VECTOR ? CHUNKS : 8 * CHUNKS);
  const int r = first + in_line * (VECTOR ? 8 : 1);
  u8* const at = out + 2 * ((col0 + (int)line) * e.out_ld + r);
#pragma unroll
  for (int j = 0; j < BN; j += 16) {
    if (j == 0 || PIECES == 1) meet_to_store();  // the piece has been read
    u8 *const piece = pieces + j / 16 % PIECES * PIECE, *next = at + 2 * j * e.out_ld;
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = (j / 2 + 2 * i) % (BN / 2);  // halves of a block of 8 columns, then of the next
      w[i] = pack(v[from], v[from + 1]);
    }
    store_matrices_turned(shared(piece) + to, w);
    meet_to_store();
    const auto mine = [&](int c) { return c + line < min(16, BN - j) && e.col(col0 + j + c + line); };
    if (VECTOR) {
      const uint4 x = *(const uint4*)(piece + turned(line, in_line));
      const u32 words[4] = {x.x, x.y, x.z, x.w};
      if (mine(0) && r >= e.first_row) store_words(next, words, e.rows - r);
    } else {
      u16 values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = *(const u16*)(piece + turned(line + 2 * i, in_line / 8) + in_line % 8 * 2);
#pragma unroll
      for (int i = 0; i < 8; ++i, next += 4 * e.out_ld)
        if (mine(2 * i) && e.row(r)) *(u16*)next = values[i];
    }
  }
}

// Output of float32, columns contiguous: neighbours trade pairs of two blocks for 16 bytes of one. Twice the bytes of 16-bit
// results drove operands out of L2: as the first to be evicted they cost a product of 1024 rows 4 % in place of 27 (H100).
DEVICE void store_float_rows(const Epilogue& e, u8* out, float (&v)[BN / 2], int row, int col, u32 lane) {
  const int q = lane & 3;
  const bool odd = lane & 1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    float* line = (float*)out + r * e.out_ld;
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
      const int i = 4 * j + 2 * h, k = (i + 4) % (BN / 2);
      if (VECTOR && j + 2 <= BN / 8) {
        const float x = __shfl_xor_sync(~0u, odd ? v[i] : v[k], 1), y = __shfl_xor_sync(~0u, odd ? v[i + 1] : v[k + 1], 1);
        const float4 four = odd ? make_float4(x, y, v[k], v[k + 1]) : make_float4(v[i], v[i + 1], x, y);
        const int c = col + 8 * (j + odd) + 2 * (q & 2);
        if (e.row(r) && c >= e.first_col) {
          if (c + 4 <= e.cols) {
            __stcs((float4*)(line + c), four);
          } else {
            if (c < e.cols) line[c] = four.x;
            if (c + 1 < e.cols) line[c + 1] = four.y;
            if (c + 2 < e.cols) line[c + 2] = four.z;
          }
        }
      } else {
#pragma unroll
        for (int b = 0; b < 2 && j + b < BN / 8; ++b) {
          const int c = col + 8 * (j + b) + 2 * q, at = (i + 4 * b) % (BN / 2);
          if (e.row(r) && e.col(c)) line[c] = v[at];
          if (e.row(r) && e.col(c + 1)) line[c + 1] = v[at + 1];
        }
      }
    }
  }
}

// Output of float32, rows contiguous: eight lanes write 32 bytes as they are.
DEVICE void store_float_columns(const Epilogue& e, u8* out, float (&v)[BN / 2], int row, int col) {
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) {
    const int r = row + 8 * ((i >> 1) & 1), c = col + 8 * (i >> 2) + (i & 1);
    if (e.row(r) && e.col(c)) ((float*)out)[c * e.out_ld + r] = v[i];
  }
}

// Write a block of 64 rows and BN columns whose first element is (row0, col0).
DEVICE void store_block(const Epilogue& e, float (&v)[BN / 2], const Bias& bias, int row0, int col0, int item, u32 thread) {
  const u32 lane = thread & 31, warp = (thread >> 5) & 3;
  const int row = row0 + 16 * warp + (lane >> 2), pair = col0 + 2 * (lane & 3);
#if EPILOGUE
  finish_block(e, v, bias, row, col0, item, lane);
#endif
  u8* out = e.out + OUT_BYTES * (item * e.out_batch);
  if (OUT == 0) {
    if (COLUMNS) store_float_columns(e, out, v, row, pair);
    else store_float_rows(e, out, v, row, col0, lane);
  } else {
    if (COLUMNS) store_half_columns(e, out, v, row0, col0, warp, lane);
    else store_half_rows(e, out, v, row, col0, lane);
  }
}
DEVICE void store_block(const Epilogue& e, float (&v)[BN / 2], int row0, int col0, int item, u32 thread) {
  store_block(e, v, bias_of(e, row0, col0, thread), row0, col0, item, thread);
}
