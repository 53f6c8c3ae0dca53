// out = epilogue(A @ B) in float32: every element is one chain of fused multiply-adds over ascending k.
//
// acc[i][j] = fma(A[i, k], B[k, j], acc[i][j]), k ascending, from +0 or from C: the contract fma/chain. With LEAF the chain
// starts anew at every `leaf` of K and its sums are added, ascending, to a total: fma/leafL. K is never padded, since
// fma(0, 0, -0) is +0; rows and columns beyond the edge are whatever shared memory holds, and are not stored.
//
// A block computes BM x BN, a warp LANES_M * TM by LANES_N * TN, a thread TM x TN in registers. Panels of BK of K go
// through a ring of STAGES buffers, which COPIERS warps of their own fill by asynchronous copies: a warp that multiplies
// issues in order, so a copy among its products would hold up the chain. What bounds it is what shared memory hands to
// registers: TM + TN values a thread for TM * TN products, and either takes a cycle of its quarter of the multiprocessor.
//
// An operand lies in shared memory as it lies in memory (strides `_r` along m or n, `_k` along k), in pieces of V values, as
// many as addresses and strides allow:
//   DEEP      neighbours along k: a line of 128 bytes, 32 of K, for each row, and chunks of so many lines; pieces of 16 bytes
//             are permuted so that those of neighbouring rows fall into different banks; fragments are 4 of K of a row
//   not DEEP  neighbours along m or n: lines of rows; fragments are groups of up to 4 rows of one k
// With BOXES the copy engine copies, at the word of one thread: what a warp of copiers issues, ten instructions for 512 bytes,
// is lost to the walkers beside it, and all of a block wait for the last. Else V is 4, 2 or 1, and copies are asynchronous.

#include "include/hopper_ptx.cu"
#include "include/fp32_epilogue.cu"
#include "include/fp32_parts.cu"

constexpr int LANES_N = 32 / LANES_M, WARPS_M = BM / (LANES_M * TM), WARPS_N = BN / (LANES_N * TN);
constexpr int WALKERS = 32 * WARPS_M * WARPS_N, COPYING = 32 * COPIERS, THREADS = WALKERS + COPYING, STEPS = BK / 4, BUFFER = (BM + BN) * BK * 4;
constexpr int LINE = 32, CHUNKS = BK / LINE, PIECES_OF_LINE = LINE / 4;
static_assert((BK & BK - 1) == 0 && BUFFER % 1024 == 0);  // lines' numbers modulo 8 are the same in every buffer

// All of 4 * V bytes if WHOLE, else `bytes` of them, at least 4; the rest becomes zeros, at the price of ten instructions.
template <int V, bool WHOLE>
__device__ __forceinline__ void copy_async(u32 to, const float* from, int bytes) {
  if (V == 4 && WHOLE)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else if (V == 2 && WHOLE)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
  else if (V == 4)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else if (V == 2)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// A thread's arrival at a barrier, once all that it has asked for is there.
__device__ __forceinline__ void arrive_behind_copies(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One operand: ROWS of a block, of which a thread multiplies T; LANES of a warp lie along them, `warp` warps before it. It
// begins BEFORE lines behind the beginning of a buffer.
template <bool DEEP_, int V_, int ROWS_, int T, int LANES, int BEFORE>
struct Side {
  static constexpr bool DEEP = DEEP_;
  static constexpr int V = V_, ROWS = ROWS_;
  static constexpr int W = T % 4 == 0 ? 4 : T % 2 == 0 ? 2 : 1;
  static constexpr bool EVEN = LANES * T % 8 == 0 || LANES * T == ROWS;  // a warp's rows begin at multiples of 8
  static constexpr int X = EVEN && LANES < 8 ? LANES : 8;  // of a row's number modulo 8, what a thread has to find out
  static_assert(EVEN || LANES % 4 == 0);
  static_assert(!DEEP || ROWS % 4 == 0 || ROWS == 2 && BEFORE == 0);  // so that numbers of lines add up as by exclusive or

  int first, read;
  __device__ __forceinline__ Side(int warp, int lane)
      : first(warp * LANES * T + lane * (DEEP ? 1 : W)), read(DEEP ? first * LINE * 4 + first % X * 16 : first * 4) {}
  // The number modulo 8 of a chunk's first line, which permutes its pieces together with a row's.
  static __device__ __forceinline__ constexpr int key(int chunk) { return (BEFORE + chunk * ROWS) % 8; }
  // A thread's row t, among those of the block.
  __device__ __forceinline__ int row(int t) const { return first + (DEEP ? t * LANES : t / W * W * LANES + t % W); }
};

#if BOXES
#define SOURCE const __grid_constant__ Map

// The copies of an operand's panels, from `k` of K on.
template <class S>
struct Copies {
  const Map* map;
  int row, k, item;
  __device__ __forceinline__ Copies(const Map& map, i64, i64, i64 batch, i64 item, int row, int, int k, int)
      : map(&map), row(row), k(k), item(batch ? (int)item : 0) {}
  __device__ __forceinline__ void copy(u32 to, u32 full) {
    if (S::DEEP) {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) tma_load(to + i * S::ROWS * LINE * 4, map, full, k + i * LINE, row, item, 0);
    } else {
      tma_load(to, map, full, row, k, item, 0);
    }
    k += BK;
  }
};
#else
#define SOURCE const float*

// The copies of an operand's panels, from `k` of K on, and a thread's part of them.
template <class S>
struct Copies {
  static constexpr bool DEEP = S::DEEP;
  static constexpr int V = S::V, ROWS = S::ROWS;
  static constexpr int LINES = DEEP ? ROWS : BK, LENGTH = DEEP ? BK : ROWS, PITCH = DEEP ? LINE : ROWS;
  static constexpr int PIECES = LENGTH / V, ACROSS = PIECES < COPYING ? PIECES : COPYING, TIMES = (PIECES + ACROSS - 1) / ACROSS;
  static constexpr int EVERY = COPYING / ACROSS, COUNT = (LINES + EVERY - 1) / EVERY;

  const float* from;
  i64 line, across, panel;  // elements from one of a thread's copies to the next, down and along lines; from panel to panel
  int rows, copier;

  __device__ __forceinline__ Copies(
      const float* p, i64 r, i64 k, i64 batch, i64 item, int row0, int rows, int begin, int copier)
      : line(EVERY * (DEEP ? r : k)), across(ACROSS * V * (DEEP ? k : r)), panel(BK * k), rows(rows - row0), copier(copier) {
    const int l = copier / ACROSS, x = copier % ACROSS * V;
    from = p + item * batch + begin * k + (row0 + (DEEP ? l : x)) * r + (DEEP ? x : l) * k;
  }
  // The next panel, of which `left` of K are there.
  __device__ __forceinline__ void copy(u32 to, int left) {
    if (left >= BK && (DEEP || rows >= ROWS)) copy<true>(to, left);
    else copy<false>(to, left);
    from += panel;
  }
  template <bool WHOLE>
  __device__ __forceinline__ void copy(u32 to, int left) const {
    const int l = copier / ACROSS, lines = min(DEEP ? rows : WHOLE ? BK : left, LINES);
    if (COPYING % ACROSS && l >= EVERY) return;
#pragma unroll
    for (int j = 0; j < TIMES; ++j) {
      const int x = (copier % ACROSS + j * ACROSS) * V, bytes = 4 * min(min(DEEP ? left : rows, LENGTH) - x, V);
      if (WHOLE ? PIECES % ACROSS && x >= LENGTH : bytes <= 0) continue;
      const int chunk = x / LINE, y = DEEP ? x % LINE ^ ((l ^ S::key(chunk)) & 7) * 4 : x;
      const float* p = from + j * across;
      u32 at = to + 4 * (l * PITCH + (DEEP ? chunk * ROWS * LINE : 0));
      int mine = (lines - l + EVERY - 1) / EVERY;
#pragma unroll 1
      for (int done = 0; done < COUNT; done += 8, mine -= 8, at += 32 * EVERY * PITCH) {
#pragma unroll
        for (int i = 0; i < 8 && i < COUNT; ++i, p += line) {
          asm volatile("" : "+l"(p));  // one sum each, not a product
          if (i < mine) copy_async<V, WHOLE>(at + 4 * (i * EVERY * PITCH + (DEEP ? y ^ (i * EVERY & 7) * 4 : y)), p, bytes);
        }
      }
    }
  }
};
#endif

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
    if (DEEP) {  // a step is a piece; the thread gives the lowest bits of a row, the others are constants
      const int chunk = step / PIECES_OF_LINE, piece = step % PIECES_OF_LINE ^ S::key(chunk);
#pragma unroll
      for (int t = 0; t < T; ++t) {
        const int at = piece ^ t * LANES & 7;
        read<4>(v + t * 4, buffer + (s.read ^ at % S::X * 16) + (chunk * S::ROWS + t * LANES) * LINE * 4 + (at & ~(S::X - 1)) * 16);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int t = 0; t < T; t += S::W)
          read<S::W>(v + k * T + t, buffer + s.read + ((step * 4 + k) * S::ROWS + t * LANES) * 4);
      }
    }
  }
};

using A = Side<DEEP_A, V_A, BM, TM, LANES_M, 0>;
using B = Side<DEEP_B, V_B, BN, TN, LANES_N, BM * CHUNKS>;

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

// Where a warp is in the ring, which copiers fill and the others empty; every barrier counts both in turns.
struct Turn {
  u32 ring, bars, at = 0, parity = 0;
  __device__ __forceinline__ u32 buffer() const { return ring + at * BUFFER; }
  __device__ __forceinline__ u32 full() const { return bars + at * 8; }
  __device__ __forceinline__ u32 empty() const { return bars + (STAGES + at) * 8; }
  __device__ __forceinline__ void next() {
    if (++at == STAGES) at = 0, parity ^= 1;
  }
};

// What copiers do of a walk.
__device__ __forceinline__ void copy(Copies<A>& a, Copies<B>& b, Turn& turn, int count) {
#pragma unroll 1
  for (int left = count; left > 0; left -= BK, turn.next()) {
    const u32 to_a = turn.buffer(), to_b = to_a + BM * BK * 4;
    barrier_wait(turn.empty(), turn.parity ^ 1);
#if BOXES
    barrier_expect(turn.full(), BUFFER);  // what lies beyond an edge counts as well: zeros
    a.copy(to_a, turn.full()), b.copy(to_b, turn.full());
#else
    a.copy(to_a, left), b.copy(to_b, left);
    arrive_behind_copies(turn.full());
#endif
  }
}

// Where a lane stands among those of its warp. Shared memory hands out 16 bytes to two lanes at once where all pairs
// (i, i ^ 1) or all pairs (i, i ^ 2) want the same: neighbours share rows of A, the next but one columns of B.
struct Lane {
  int m, n;
  __device__ __forceinline__ Lane() {
    const int lane = threadIdx.x % 32;
    m = LANES_N == 1 ? lane : lane / 2 % LANES_M, n = LANES_N == 1 ? 0 : lane % 2 + lane / (2 * LANES_M) * 2;
  }
};

// A thread's number in its block, beginning with the walkers. Places of warps lie on the four quarters of a multiprocessor in
// turns, so blocks of an even number of warps would leave quarters to copiers, which issue next to nothing: warps of
// neighbouring blocks change their parts. Synchronizes the block.
__device__ __forceinline__ int part_of_block() {
  __shared__ int turned;
  u32 place;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(place));
  if (threadIdx.x == 0) turned = place / 4;
  __syncthreads();
  return THREADS % 64 ? threadIdx.x : (threadIdx.x + turned * 32) % THREADS;
}

// This warp has read what it wants of a buffer.
__device__ __forceinline__ void leave(Turn& turn) {
  if (BOXES) fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(turn.empty());
  turn.next();
}

// The chain over `count` of K, continued in acc; a leaf ends with every `panels` of them where that is not 0.
__device__ __forceinline__ void walk(
    float (&acc)[TM][TN], float (&total)[LEAF ? TM : 1][TN], const u8* ring, const A& a, const B& b, Turn& turn, int count, int panels) {
  barrier_wait(turn.full(), turn.parity);
  static_assert(STEPS % (AHEAD + 1) == 0);
  Step f[AHEAD + 1];
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) f[s].load(ring + turn.at * BUFFER, a, b, s);
#pragma unroll 1
  for (int i = 0; i < count / BK; ++i) {
    bool ready = true;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (s + AHEAD + 2 == STEPS && (i + 1) * BK < count) {  // asked well before it has to be known
        Turn then = turn;
        then.next();
        ready = barrier_passed(then.full(), then.parity);
      }
      if (s + AHEAD == STEPS) {  // all of this panel is in registers or on its way there
        leave(turn);
        if (!ready) barrier_wait(turn.full(), turn.parity);
      }
      f[(s + AHEAD) % (AHEAD + 1)].load(ring + turn.at * BUFFER, a, b, (s + AHEAD) % STEPS);
#pragma unroll
      for (int k = 0; k < 4; ++k) f[s % (AHEAD + 1)].multiply(acc, k);  // order-critical: k outside, ascending
    }
    if (LEAF && panels && (i + 1) % panels == 0) settle(total, acc);
  }
  const int rest = count % BK;
#pragma unroll 1
  for (int s = 0; s * 4 < rest; ++s) {
    f[0].load(ring + turn.at * BUFFER, a, b, s);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (s * 4 + k < rest) f[0].multiply(acc, k);
  }
  if (rest) leave(turn);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm(SOURCE a, SOURCE b, void* out, const void* c, const void* bias, i64 a_r, i64 a_k, i64 a_batch, i64 b_r,
      i64 b_k, i64 b_batch, i64 out_r, i64 out_c, i64 out_batch, i64 c_r, i64 c_c, i64 c_batch, i64 bias_stride, int m, int n,
      int k, int batch, int leaf, float alpha, float beta, float* sums, u32* flags, int team) {
  extern __shared__ __align__(1024) u8 ring[];
  __shared__ u64 bars[2 * STAGES];
  const Lane lane;
  Turn turn{shared(ring), shared(bars)};
  for (int i = threadIdx.x; i < 2 * STAGES; i += THREADS)
    barrier_init(turn.bars + i * 8, i >= STAGES ? WALKERS / 32 : BOXES ? 1 : COPYING);
  barrier_init_fence();
  const int thread = part_of_block(), warp = thread / 32, copier = thread % COPYING;
  const A x(warp / WARPS_N, lane.m);
  const B y(warp % WARPS_N, lane.n);
  const bool parts = LEAF && leaf % BK;  // leaves that end within a panel are walked one by one

  each_part(m, n, k, batch, team, [&](int m0, int n0, i64 item, int start, int stop, bool last) {
    wait_for_predecessor();
    if (thread >= WALKERS) {
      if (BOXES && !elected()) return;
      for (int begin = start;; begin += leaf) {
        Copies<A> of_a(a, a_r, a_k, a_batch, item, m0, m, begin, copier);
        Copies<B> of_b(b, b_r, b_k, b_batch, item, n0, n, begin, copier);
        copy(of_a, of_b, turn, parts ? min(k - begin, leaf) : stop - start);
        if (!parts || k - begin <= leaf) return;  // begin + leaf may not fit an int
      }
    }
    const Epilogue e{out, c, bias, out_r, out_c, item * out_batch, c_r, c_c, item * c_batch, bias_stride, alpha, beta};
    float acc[TM][TN] = {}, total[LEAF ? TM : 1][TN] = {};
    if (start == 0 && e.starts()) {
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j)
          if (m0 + x.row(i) < m && n0 + y.row(j) < n)
            (LEAF ? total[LEAF ? i : 0][j] : acc[i][j]) = e.start(m0 + x.row(i), n0 + y.row(j));
      }
    }
    const Handover<WALKERS> handover{sums, flags, team};
    if (SHARED && start > 0) handover.take(acc, thread);
    if (parts) {
      for (int left = k; left > 0; left -= leaf) {
        walk(acc, total, ring, x, y, turn, min(left, leaf), 0);
        settle(total, acc);
      }
    } else {
      walk(acc, total, ring, x, y, turn, stop - start, LEAF ? leaf / BK : 0);
      if (LEAF && k % leaf) settle(total, acc);
    }
    if (last) release_successor();
    if (SHARED && stop < k) return handover.give(acc, thread);
    constexpr int W = DEEP_B ? 1 : B::W;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int r = m0 + x.row(i);
      if (r >= m) continue;
#pragma unroll
      for (int j = 0; j < TN; j += W) e.store<W>(LEAF ? &total[LEAF ? i : 0][j] : &acc[i][j], r, n0 + y.row(j), n);
    }
  });
  if (thread >= WALKERS) wait_for_copies(), release_successor();
}
