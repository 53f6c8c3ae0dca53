// out = epilogue(A @ B) in float32: every element is one chain of fused multiply-adds over ascending k.
//
// acc[i][j] = fma(A[i, k], B[k, j], acc[i][j]), k ascending, from +0 or from C: the contract fma/chain. With LEAF the chain
// starts anew at every `leaf` of K and its sums are added, ascending, to a total: fma/leafL. K is never padded, since
// fma(0, 0, -0) is +0; rows and columns beyond the edge repeat the last one and are not stored.
//
// A block of (BM / TM) * (BN / TN) threads computes BM x BN, a thread TM x TN in registers. Panels of BK of K go through
// registers into two buffers in shared memory, [k][row], so that fragments are read 16 bytes at a time without bank
// conflicts: lanes form a 4 x 8 grid, and a thread's rows and columns lie in groups of 4 that far apart. 16 bytes go to two
// lanes at once where all pairs (i, i ^ 1) or all pairs (i, i ^ 2) want the same: neighbours share rows, the next but one
// columns.
//
// Operands, by MODE_A and MODE_B (strides `_r` along m or n, `_k` along k), V_A and V_B values to a load:
//   0  4, 2 or 1 along k, transposed on the way: row-major A, and weights [n, k]
//   1  4 along m or n
//   2  single values, neighbours along m or n: any strides and addresses

#include "include/hopper_ptx.cu"
#include "include/fp32_epilogue.cu"
#include "include/fp32_parts.cu"

constexpr int THREADS = BM / TM * (BN / TN);
constexpr int WARPS_N = BN / (8 * TN);

struct Operand {
  const float* p;
  i64 r, k;
  int rows;
};

// Where row r of panel row k lies. Mode 0 stores four k of one row at once: the swizzle spreads them over the banks.
template <int MODE, int ROWS>
__device__ __forceinline__ constexpr int swizzle(int k) { return MODE == 0 ? k / 4 * (128 / BK) % ROWS : 0; }
template <int MODE, int ROWS>
__device__ __forceinline__ int at(int k, int r) { return k * ROWS + (r ^ swizzle<MODE, ROWS>(k)); }

// Keeps the compiler from computing a value anew where it is used.
__device__ __forceinline__ int held(int x) { asm volatile("" : "+r"(x)); return x; }

// One operand's panels: ROWS x BK values, COUNT of them by each thread, V by each load.
template <int MODE, int V, int ROWS>
struct Panel {
  static constexpr int COUNT = ROWS * BK / THREADS, STEP = MODE < 2 ? 4 : 1, N = COUNT / STEP;
  float v[COUNT];
  const float* from[N];
  int to[N];
  i64 step;

  static __device__ __forceinline__ int row(int i) {
    const int x = threadIdx.x + i * THREADS;
    return MODE == 0 ? x / (BK / 4) : MODE == 1 ? x % (ROWS / 4) * 4 : x % ROWS;
  }
  static __device__ __forceinline__ int depth(int i) {
    const int x = threadIdx.x + i * THREADS;
    return MODE == 0 ? x % (BK / 4) * 4 : MODE == 1 ? x / (ROWS / 4) : x / ROWS;
  }
  __device__ __forceinline__ void start(const Operand& x, int first, int k) {
    step = BK * x.k;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = held(at<MODE, ROWS>(depth(i), row(i)));
      const int r = min(first + row(i), x.rows - (MODE == 1 ? 4 : 1));
      from[i] = x.p + r * x.r + (k + depth(i)) * x.k;
    }
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = i * STEP; j < (i + 1) * STEP; j += V) {
        const float* at = from[i] + j % STEP;
        if (V == 4) *(float4*)(v + j) = __ldg((const float4*)at);
        else if (V == 2) *(float2*)(v + j) = __ldg((const float2*)at);
        else v[j] = __ldg(at);
      }
      from[i] += step;
    }
  }
  __device__ __forceinline__ void load_tail(int count) {  // the first `count` of K
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < STEP; ++j)
        v[i * STEP + j] = depth(i) + (MODE == 0 ? j : 0) < count ? __ldg(from[i] + j) : 0.0f;
    }
  }
  __device__ __forceinline__ void store(float* panel) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (MODE == 1) {
        *(float4*)(panel + to[i]) = *(const float4*)(v + 4 * i);
      } else {
#pragma unroll
        for (int j = 0; j < STEP; ++j) panel[to[i] + j * ROWS] = v[i * STEP + j];
      }
    }
  }
};

// A thread's T values of a panel row: groups of W, LANES groups of other lanes between them. The swizzle's bits inside such
// a span permute lanes, those inside a warp's share the thread's own groups, those above the warps.
template <int MODE, int ROWS, int T, int LANES>
struct Fragments {
  static constexpr int W = T < 4 ? T : 4, SPAN = LANES * W, SHARE = LANES * T, PATTERNS = MODE == 0 ? BK / 4 : 1;
  int offset[PATTERNS];
  __device__ __forceinline__ Fragments(int base, int lane) {
#pragma unroll
    for (int i = 0; i < PATTERNS; ++i) {
      const int bits = swizzle<MODE, ROWS>(4 * i);
      offset[i] = (base ^ bits / SHARE * SHARE) + (lane * W ^ bits % SPAN);
      if (i == 0 || bits % SPAN || bits / SHARE) offset[i] = held(offset[i]);
    }
  }
  __device__ __forceinline__ void load(float (&f)[T], const float* panel, int k) const {
    const int bits = swizzle<MODE, ROWS>(k) % SHARE / SPAN;
#pragma unroll
    for (int c = 0; c < T / W; ++c) {
      const float* p = panel + k * ROWS + offset[k / 4 % PATTERNS] + (c ^ bits) * SPAN;
      if (W == 4) *(float4*)(f + 4 * c) = *(const float4*)p;
      else if (W == 2) *(float2*)(f + 2 * c) = *(const float2*)p;
      else f[c] = *p;
    }
  }
};

struct Shared {
  float a[2][BK * BM], b[2][BK * BN];
};

struct Thread {
  int row, col, lane_row, lane_col;
  __device__ __forceinline__ Thread() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = warp / WARPS_N * (4 * TM), col = warp % WARPS_N * (8 * TN), lane_row = lane / 2 % 4, lane_col = lane % 2 + lane / 8 * 2;
  }
  __device__ __forceinline__ int m(int i) const {
    constexpr int W = TM < 4 ? TM : 4;
    return row + i / W * (4 * W) + lane_row * W + i % W;
  }
  __device__ __forceinline__ int n(int j) const {
    constexpr int W = TN < 4 ? TN : 4;
    return col + j / W * (8 * W) + lane_col * W + j % W;
  }
};

// Registers lie in two banks of one port each: of the three that a product reads, one has to be kept from the product before
// and the others to lie in both banks. So columns are walked to and fro, and `volatile` keeps the compiler from another order,
// where that was seen to be faster.
__device__ __forceinline__ void multiply(float (&acc)[TM][TN], const float (&x)[TM], const float (&y)[TN]) {
  constexpr bool TO_AND_FRO = TM == 8 && TN == 8 && MODE_A == 0 && MODE_B == 0;
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int t = 0; t < TN; ++t) {
      const int j = TO_AND_FRO && i % 2 ? TN - 1 - t : t;
      // order-critical: k outside, ascending
      if (TO_AND_FRO) asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(acc[i][j]) : "f"(x[i]), "f"(y[j]));
      else acc[i][j] = __fmaf_rn(x[i], y[j], acc[i][j]);
    }
  }
}

using FragmentsA = Fragments<MODE_A, BM, TM, 4>;
using FragmentsB = Fragments<MODE_B, BN, TN, 8>;

struct Walk {
  Shared& s;
  Panel<MODE_A, V_A, BM> pa;
  Panel<MODE_B, V_B, BN> pb;
  FragmentsA fa;
  FragmentsB fb;
  float x[2][TM], y[2][TN];

  __device__ __forceinline__ Walk(Shared& s, const Operand& a, const Operand& b, int m0, int n0, int begin, const Thread& t)
      : s(s), fa(t.row, t.lane_row), fb(t.col, t.lane_col) {
    pa.start(a, m0, begin), pb.start(b, n0, begin);
  }
  __device__ __forceinline__ void fetch(int slot, int buffer, int k) {
    fa.load(x[slot], s.a[buffer], k), fb.load(y[slot], s.b[buffer], k);
  }
  __device__ __forceinline__ void store(int buffer) { pa.store(s.a[buffer]), pb.store(s.b[buffer]); }

  // One panel. Its last fragments are multiplied while the first ones of the next panel come.
  template <int BUFFER>
  __device__ __forceinline__ void panel(float (&acc)[TM][TN], bool more) {
    if (more) pa.load(), pb.load();
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      if (k + 1 < BK) {
        fetch((k + 1) & 1, BUFFER, k + 1);
      } else {
        if (more) store(1 - BUFFER);
        __syncthreads();
        if (more) fetch(0, 1 - BUFFER, 0);
      }
      multiply(acc, x[k & 1], y[k & 1]);
    }
  }

  __device__ __forceinline__ void panels(float (&acc)[TM][TN], int count) {
    if (!count) return;
    pa.load(), pb.load();
    store(0);
    __syncthreads();
    fetch(0, 0, 0);
    for (int i = 0; i < count; i += 2) {
      panel<0>(acc, i + 1 < count);
      if (i + 1 < count) panel<1>(acc, i + 2 < count);
    }
  }

  __device__ __forceinline__ void tail(float (&acc)[TM][TN], int count) {
    pa.load_tail(count), pb.load_tail(count);
    store(0);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      if (k >= count) break;
      fetch(0, 0, k);
      multiply(acc, x[0], y[0]);
    }
    __syncthreads();
  }
};

// The chain over [begin, end) of K, continued in acc.
__device__ __forceinline__ void walk(
    float (&acc)[TM][TN], Shared& s, const Operand& a, const Operand& b, int m0, int n0, int begin, int end, const Thread& t) {
  Walk w(s, a, b, m0, n0, begin, t);
  w.panels(acc, (end - begin) / BK);
  if ((end - begin) % BK) w.tail(acc, (end - begin) % BK);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm(const float* a, const float* b, void* out, const void* c, const void* bias, i64 a_r, i64 a_k, i64 a_batch, i64 b_r,
      i64 b_k, i64 b_batch, i64 out_r, i64 out_c, i64 out_batch, i64 c_r, i64 c_c, i64 c_batch, i64 bias_stride, int m, int n,
      int k, int batch, int leaf, float alpha, float beta, float* sums, u32* flags, int team) {
  __shared__ alignas(16) Shared shared;
  const Thread t;
  each_part(m, n, k, batch, team, [&](int m0, int n0, i64 item, int start, int stop, bool last) {
    const Operand x{a + item * a_batch, a_r, a_k, m}, y{b + item * b_batch, b_r, b_k, n};
    const Epilogue e{out, c, bias, out_r, out_c, item * out_batch, c_r, c_c, item * c_batch, bias_stride, alpha, beta};
    wait_for_predecessor();
    float acc[TM][TN];
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; ++j) acc[i][j] = 0.0f;
    }
    if (start == 0 && e.starts()) {
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j)
          if (m0 + t.m(i) < m && n0 + t.n(j) < n) acc[i][j] = e.start(m0 + t.m(i), n0 + t.n(j));
      }
    }
    const Handover<THREADS> handover{sums, flags, team};
    if (SHARED && start > 0) handover.take(acc, threadIdx.x);
#if LEAF
    for (int begin = 0; begin < k; begin += leaf) {
      float sum[TM][TN] = {};
      walk(sum, shared, x, y, m0, n0, begin, min(k - begin, leaf) + begin, t);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = __fadd_rn(acc[i][j], sum[i][j]);  // order-critical: leaves ascending
      }
      if (k - begin <= leaf) break;  // begin + leaf may not fit an int
    }
#else
    walk(acc, shared, x, y, m0, n0, start, stop, t);
#endif
    if (last) release_successor();
    if (SHARED && stop < k) return handover.give(acc, threadIdx.x);
    constexpr int W = TN < 4 ? TN : 4;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int r = m0 + t.m(i);
      if (r >= m) continue;
#pragma unroll
      for (int j = 0; j < TN; j += W) e.store<W>(&acc[i][j], r, n0 + t.n(j), n);
    }
  });
}
