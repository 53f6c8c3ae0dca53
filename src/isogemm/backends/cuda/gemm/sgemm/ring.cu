// out = epilogue(A @ B) in float32: every element is one chain of fused multiply-adds over ascending k.
//
// acc[i][j] = fma(A[i, k], B[k, j], acc[i][j]), k ascending, from +0 or from C: the contract fma/chain. With LEAF the chain
// starts anew at every `leaf` of K and its sums are added, ascending, to a total: fma/leafL. K is never padded, since
// fma(0, 0, -0) is +0; rows and columns beyond the edge are whatever shared memory holds, and are not stored.
//
// A block computes BM x BN, a warp LANES_M * TM by LANES_N * TN, a thread TM x TN in registers. Panels of BK of K go
// through a ring of STAGES buffers, which asynchronous copies fill while earlier panels are multiplied. What bounds it is
// what shared memory hands to registers, 32 values a cycle: TM + TN of them a thread for TM * TN products.
//
// An operand lies in shared memory as it lies in memory (strides `_r` along m or n, `_k` along k), and is copied in pieces
// of V values, as many as addresses and strides allow:
//   DEEP      neighbours along k: lines of BK, in which pieces of 16 bytes are permuted so that those of neighbouring rows
//             fall into different banks; fragments are 4 of K of a row
//   not DEEP  neighbours along m or n: lines of rows; fragments are groups of up to 4 rows of one k

#include "include/hopper_ptx.cu"
#include "include/fp32_epilogue.cu"

constexpr int LANES_N = 32 / LANES_M, WARPS_M = BM / (LANES_M * TM), WARPS_N = BN / (LANES_N * TN);
constexpr int THREADS = 32 * WARPS_M * WARPS_N, STEPS = BK / 4, BUFFER = (BM + BN) * BK * 4;
constexpr int GROUP = 8;  // tiles of m that share columns of B in L2

// `bytes` of 4 * V, at least 4; the rest becomes zeros.
template <int V>
__device__ __forceinline__ void copy_async(u32 to, const float* from, int bytes) {
  if (V == 4)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else if (V == 2)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// One operand: ROWS of a block, of which a thread multiplies T; LANES of a warp lie along them, `warp` warps before it.
template <bool DEEP, int V, int ROWS, int T, int LANES>
struct Side {
  static constexpr int LINES = DEEP ? ROWS : BK, LENGTH = DEEP ? BK : ROWS;
  static constexpr int ACROSS = LENGTH / V, EVERY = THREADS / ACROSS, COPIES = (LINES + EVERY - 1) / EVERY;
  static constexpr int W = T < 4 ? T : 4, X = LANES < 8 ? LANES : 8;
  static_assert(EVERY > 0 && (LANES * T % 8 == 0 || LANES * T == ROWS));

  const float* from;
  i64 line, panel;  // elements from one of a thread's copies to the next, and from panel to panel
  int rows, first, read;

  __device__ __forceinline__ Side(const float* p, i64 r, i64 k, int row0, int rows, int warp, int lane)
      : line(EVERY * (DEEP ? r : k)), panel(BK * k), rows(rows - row0), first(warp * LANES * T + lane * (DEEP ? 1 : W)) {
    const int l = threadIdx.x / ACROSS, x = threadIdx.x % ACROSS * V;
    from = p + (row0 + (DEEP ? l : x)) * r + (DEEP ? x : l) * k;
    read = DEEP ? first * BK * 4 + lane % X * 16 : first * 4;
  }
  // The next panel, of which `left` of K are there.
  __device__ __forceinline__ void copy(u32 to, int left) {
    const int l = threadIdx.x / ACROSS, x = threadIdx.x % ACROSS * V;
    const int lines = min(DEEP ? rows : left, LINES), bytes = 4 * min((DEEP ? left : rows) - x, V);
    if (bytes > 0 && (THREADS % ACROSS == 0 || l < EVERY)) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int at = l + i * EVERY;
        if (at < lines) copy_async<V>(to + 4 * (at * LENGTH + (DEEP ? x ^ (at & 7) * 4 : x)), from + i * line, bytes);
      }
    }
    from += panel;
  }
  // A thread's row t, among those of the block.
  __device__ __forceinline__ int row(int t) const { return first + (DEEP ? t * LANES : t / W * W * LANES + t % W); }
};

// A step, 4 of K, of a thread's T rows.
template <bool DEEP, int T>
struct Fragment {
  float v[T * 4];
  __device__ __forceinline__ float at(int t, int k) const { return v[DEEP ? t * 4 + k : k * T + t]; }
  template <int N>
  static __device__ __forceinline__ void read(float* to, const u8* from) {
    if (N == 4) *(float4*)to = *(const float4*)from;
    else if (N == 2) *(float2*)to = *(const float2*)from;
    else *to = *(const float*)from;
  }
  template <class S, int LANES>
  __device__ __forceinline__ void load(const u8* buffer, const S& s, int step) {
    if (DEEP) {  // a step is a piece; the lane gives the lowest bits of a row, the others are constants
      const u8* p = buffer + (s.read ^ step % S::X * 16);
#pragma unroll
      for (int t = 0; t < T; ++t)
        read<4>(v + t * 4, p + t * LANES * BK * 4 + ((t * LANES & 7 ^ step) & ~(S::X - 1)) * 16);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int t = 0; t < T; t += S::W)
          read<S::W>(v + k * T + t, buffer + s.read + ((step * 4 + k) * S::LENGTH + t * LANES) * 4);
      }
    }
  }
};

using A = Side<DEEP_A, V_A, BM, TM, LANES_M>;
using B = Side<DEEP_B, V_B, BN, TN, LANES_N>;

struct Step {
  Fragment<DEEP_A, TM> a;
  Fragment<DEEP_B, TN> b;
  __device__ __forceinline__ void load(const u8* buffer, const A& x, const B& y, int step) {
    a.template load<A, LANES_M>(buffer, x, step), b.template load<B, LANES_N>(buffer + BM * BK * 4, y, step);
  }
  __device__ __forceinline__ void multiply(float (&acc)[TM][TN], int k) const {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; ++j) acc[i][j] = __fmaf_rn(a.at(i, k), b.at(j, k), acc[i][j]);
    }
  }
};

// The end of a leaf.
__device__ __forceinline__ void settle(float (&total)[LEAF ? TM : 1][TN], float (&acc)[TM][TN]) {
#pragma unroll
  for (int i = 0; i < (LEAF ? TM : 0); ++i) {
#pragma unroll
    for (int j = 0; j < TN; ++j) total[i][j] = __fadd_rn(total[i][j], acc[i][j]), acc[i][j] = 0.0f;  // order-critical: ascending
  }
}

// The chain over `count` of K, continued in acc; a leaf ends with every `panels` of them where that is not 0.
__device__ __forceinline__ void walk(
    float (&acc)[TM][TN], float (&total)[LEAF ? TM : 1][TN], u8* ring, A& a, B& b, int count, int panels) {
  int left = count, filled = 0, used = 0;  // of K still to copy; where in the ring
  const auto fill = [&] {
    if (left > 0) a.copy(shared(ring + filled), left), b.copy(shared(ring + filled) + BM * BK * 4, left);
    commit_copies();
    left -= BK, filled = filled == (STAGES - 1) * BUFFER ? 0 : filled + BUFFER;
  };
#pragma unroll 1
  for (int s = 0; s < STAGES; ++s) fill();
  wait_for_copies<STAGES - 1>();
  __syncthreads();
  Step f[AHEAD + 1];
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) f[s].load(ring, a, b, s);
#pragma unroll 1
  for (int i = 0; i < count / BK; ++i) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (s + AHEAD == STEPS) {  // all of this panel is in registers or on its way there
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        fill();
        used = used == (STAGES - 1) * BUFFER ? 0 : used + BUFFER;
      }
      f[(s + AHEAD) % (AHEAD + 1)].load(ring + used, a, b, (s + AHEAD) % STEPS);
#pragma unroll
      for (int k = 0; k < 4; ++k) f[s % (AHEAD + 1)].multiply(acc, k);  // order-critical: k outside, ascending
    }
    if (LEAF && panels && (i + 1) % panels == 0) settle(total, acc);
  }
  const int rest = count % BK;
#pragma unroll 1
  for (int s = 0; s * 4 < rest; ++s) {
    f[0].load(ring + used, a, b, s);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (s * 4 + k < rest) f[0].multiply(acc, k);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm(const float* a, const float* b, void* out, const void* c, const void* bias, i64 a_r, i64 a_k, i64 a_batch, i64 b_r,
      i64 b_k, i64 b_batch, i64 out_r, i64 out_c, i64 out_batch, i64 c_r, i64 c_c, i64 c_batch, i64 bias_stride, int m, int n,
      int k, int batch, int leaf, int types, float alpha, float beta) {
  extern __shared__ __align__(128) u8 ring[];
  const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
  const int first = blockIdx.x / (GROUP * tiles_n) * GROUP, high = min(tiles_m - first, GROUP), in = blockIdx.x - first * tiles_n;
  const int m0 = (first + in % high) * BM, n0 = in / high * BN;
  const i64 item = blockIdx.y + (i64)blockIdx.z * gridDim.y;
  if (item >= batch) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  A x(a + item * a_batch, a_r, a_k, m0, m, warp / WARPS_N, lane / LANES_N);
  B y(b + item * b_batch, b_r, b_k, n0, n, warp % WARPS_N, lane % LANES_N);
  const Epilogue e{out, c, bias, out_r, out_c, item * out_batch, c_r, c_c, item * c_batch, bias_stride, types, alpha, beta};
  wait_for_predecessor();
  float acc[TM][TN] = {}, total[LEAF ? TM : 1][TN] = {};
  if (e.starts()) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; ++j)
        if (m0 + x.row(i) < m && n0 + y.row(j) < n)
          (LEAF ? total[LEAF ? i : 0][j] : acc[i][j]) = e.start(m0 + x.row(i), n0 + y.row(j));
    }
  }
  if (LEAF && leaf % BK) {  // leaves that end within a panel are walked one by one
    const float *const from_a = x.from, *const from_b = y.from;
    for (int begin = 0; begin < k; begin += leaf) {
      x.from = from_a + begin * a_k, y.from = from_b + begin * b_k;
      walk(acc, total, ring, x, y, min(k - begin, leaf), 0);
      settle(total, acc);
      if (k - begin <= leaf) break;  // begin + leaf may not fit an int
      __syncthreads();
    }
  } else {
    walk(acc, total, ring, x, y, k, LEAF ? leaf / BK : 0);
    if (LEAF && k % leaf) settle(total, acc);
  }
  release_successor();
  constexpr int W = DEEP_B ? 1 : B::W;
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int r = m0 + x.row(i);
    if (r >= m) continue;
#pragma unroll
    for (int j = 0; j < TN; j += W) e.store<W>(LEAF ? &total[LEAF ? i : 0][j] : &acc[i][j], r, n0 + y.row(j), n);
  }
}
