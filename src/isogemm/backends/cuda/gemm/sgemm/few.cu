// out = epilogue(A @ B) in float32 for a few rows of A, where streaming B is all the work: fma/chain and fma/leafL.
//
// acc = fma(A[i, k], B[k, j], acc), k ascending, from +0 or from C; every element belongs to one thread. K is not padded.
// Both operands lie with K contiguous (weights [n, k]) and are read through maps (k, row, item) of boxes of 32 of K.
//
// A warp computes 32 / LANES_M * TN columns and LANES_M * TM rows, a block WARPS times as many columns. What bounds it, beside
// B, is what shared memory hands to registers, 128 bytes a cycle: 4 * (TM + TN) bytes for TM * TN products of a thread.
// One more warp fills a ring of STAGES buffers with BK of K of every row and column. In shared memory 32 of K are a row of 128 bytes, in which
// the copy engine permutes the pieces of 16 bytes, so that those of neighbouring rows fall into different banks.
// LEAF: a leaf is a multiple of BK.

#include "include/hopper_ptx.cu"
#include "include/fp32_epilogue.cu"

constexpr int LANES_N = 32 / LANES_M, COLS = LANES_N * TN * WARPS, ROWS = LANES_M * TM, SLABS = BK / 32;
constexpr int COLS_BYTES = COLS * 128, ROWS_BYTES = ROWS < 8 ? 1024 : ROWS * 128, SLAB = COLS_BYTES + ROWS_BYTES, BUFFER = SLABS * SLAB;

// Where a thread's pieces lie in a slab: piece c of its first column at y[c % LANES_N], of its first row at x[c % LANES_M].
// Piece c of a line has place (line ^ c) % 8; the bits of a line that the lane gives are in y and x, the others are constants.
struct Pieces {
  static constexpr int Y = LANES_N < 8 ? LANES_N : 8, X = LANES_M < 8 ? LANES_M : 8;
  u32 y[Y], x[X];
  __device__ __forceinline__ Pieces(int column, int row) {
#pragma unroll
    for (int c = 0; c < Y; ++c) y[c] = column * 128 + (column % Y ^ c) * 16;
#pragma unroll
    for (int c = 0; c < X; ++c) x[c] = COLS_BYTES + row * 128 + (row % X ^ c) * 16;
  }
};

// Four of K of a thread's columns and rows.
struct Four {
  float4 a[TM], b[TN];
  __device__ __forceinline__ void load(const u8* slab, const Pieces& at, int c) {
    constexpr int Y = Pieces::Y, X = Pieces::X;
#pragma unroll
    for (int j = 0; j < TN; ++j)
      b[j] = *(const float4*)(slab + at.y[c % Y] + j * LANES_N * 128 + ((j * LANES_N ^ c) & 7 & ~(Y - 1)) * 16);
#pragma unroll
    for (int i = 0; i < TM; ++i)
      a[i] = *(const float4*)(slab + at.x[c % X] + i * LANES_M * 128 + ((i * LANES_M ^ c) & 7 & ~(X - 1)) * 16);
  }
  __device__ __forceinline__ void multiply(float (&acc)[TM][TN]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // order-critical: k ascending
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = __fmaf_rn((&a[i].x)[k], (&b[j].x)[k], acc[i][j]);
      }
    }
  }
};

// BK of K; reads from shared memory run AHEAD steps before their use.
__device__ __forceinline__ void panel(float (&acc)[TM][TN], const u8* buffer, const Pieces& at) {
  constexpr int AHEAD = TM * TN > 2 ? 2 : 4, STEPS = BK / 4;
  Four f[AHEAD + 1];
#pragma unroll
  for (int p = 0; p < AHEAD; ++p) f[p].load(buffer + p / 8 * SLAB, at, p % 8);
#pragma unroll
  for (int p = 0; p < STEPS; ++p) {
    const int q = p + AHEAD;
    if (q < STEPS) f[q % (AHEAD + 1)].load(buffer + q / 8 * SLAB, at, q % 8);
    f[p % (AHEAD + 1)].multiply(acc);
  }
}

// The last of K, one value at a time.
__device__ __forceinline__ void tail(float (&acc)[TM][TN], const u8* buffer, int column, int row, int count) {
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const u8* slab = buffer + k / 32 * SLAB + k % 4 * 4;
    const int c = k % 32 / 4;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int r = row + i * LANES_M;
      const float a = *(const float*)(slab + COLS_BYTES + r * 128 + ((r ^ c) & 7) * 16);
#pragma unroll
      for (int j = 0; j < TN; ++j) {
        const int n = column + j * LANES_N;
        acc[i][j] = __fmaf_rn(a, *(const float*)(slab + n * 128 + ((n ^ c) & 7) * 16), acc[i][j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 32)
sgemm_few(const __grid_constant__ Map map_a, const __grid_constant__ Map map_b, void* out, const void* c, const void* bias,
          i64 out_r, i64 out_c, i64 out_batch, i64 c_r, i64 c_c, i64 c_batch, i64 bias_stride, int m, int n, int k, int batch,
          int items_a, int items_b, int leaf, int types, float alpha, float beta) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  u8* ring = memory + (-shared(memory) & 1023);
  const u32 full = shared(barriers), empty = full + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, panels = (k + BK - 1) / BK;
  const i64 item = blockIdx.y + (i64)blockIdx.z * gridDim.y;
  if (item >= batch) return;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, WARPS);
    barrier_init_fence();
  }
  __syncthreads();
  const int n0 = blockIdx.x * COLS;

  if (warp == WARPS) {
    if (lane) return;
    const int za = items_a > 1 ? (int)item : 0, zb = items_b > 1 ? (int)item : 0;
    map_prefetch(&map_a), map_prefetch(&map_b);
    wait_for_predecessor();
    for (int i = 0; i < panels; ++i) {
      const int s = i % STAGES;
      const u32 to = shared(ring + s * BUFFER), bar = full + 8 * s;
      barrier_wait(empty + 8 * s, (i / STAGES & 1) ^ 1);
      barrier_expect(bar, SLABS * (COLS + ROWS) * 128);
#pragma unroll
      for (int j = 0; j < SLABS; ++j) {
        tma_load(to + j * SLAB, &map_b, bar, i * BK + 32 * j, n0, zb, 0);
        tma_load(to + j * SLAB + COLS_BYTES, &map_a, bar, i * BK + 32 * j, 0, za, 0);
      }
    }
    release_successor();
    return;
  }

  wait_for_predecessor();
  const int row = lane % LANES_M, column = warp * (LANES_N * TN) + lane / LANES_M, col = n0 + column;
  const Epilogue e{out, c, bias, out_r, out_c, item * out_batch, c_r, c_c, item * c_batch, bias_stride, types, alpha, beta};
  const Pieces at(column, row);
  float acc[TM][TN], total[LEAF ? TM : 1][TN];
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; ++j) {
      const int r = row + i * LANES_M, q = col + j * LANES_N;
      acc[i][j] = e.starts() && r < m && q < n ? e.start(r, q) : 0.0f;
      if (LEAF) total[LEAF ? i : 0][j] = acc[i][j], acc[i][j] = 0.0f;
    }
  }
  for (int i = 0; i < panels; ++i) {
    const int s = i % STAGES;
    const u8* buffer = ring + s * BUFFER;
    barrier_wait(full + 8 * s, i / STAGES & 1);
    if (k - i * BK >= BK) {
      panel(acc, buffer, at);
    } else {
      tail(acc, buffer, column, row, k - i * BK);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * s);
    if (LEAF && ((i + 1) * (i64)BK % leaf == 0 || i + 1 == panels)) {
#pragma unroll
      for (int r = 0; r < TM; ++r) {
#pragma unroll
        for (int j = 0; j < TN; ++j) {  // order-critical: leaves ascending
          float& sum = total[LEAF ? r : 0][j];
          sum = __fadd_rn(sum, acc[r][j]), acc[r][j] = 0.0f;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; ++j) {
      const int r = row + i * LANES_M, q = col + j * LANES_N;
      float v = LEAF ? total[LEAF ? i : 0][j] : acc[i][j];
      if (r < m && q < n) e.store<1>(&v, r, q, n);
    }
  }
}
