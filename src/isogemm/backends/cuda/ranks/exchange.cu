// Sums over ranks, and rows of all ranks, through memory that every rank maps (ranks/mailbox.py lays it out).
//
//   out = round(tree(partial of rank 0, ..., partial of rank WORLD - 1) + bias)
//
// A rank writes into the others' memory and reads its own alone, so a value crosses the link once and nobody waits for an
// answer. OUT and BIAS are types of elements, BIAS 3 for none.

#include "include/elements.cu"

struct alignas(64) Peers { char* of[16]; };  // the memory of each rank, as this one maps it

constexpr int W = 8;                          // floats of a word: what a thread takes at once
constexpr int PARTS = W / 4;                  // 16 bytes each, of partial sums
constexpr int RESULTS = OUT ? 1 : 2;          // likewise, of the result
constexpr u32 ABSENT = 0xffffffff;            // what a box holds before numbers arrive: a NaN, or two, that are never sent
constexpr int ARRIVED = 0, RETURNED = 1;      // kinds of flags

// Waiting for another rank, at most `patience` nanoseconds: then the kernel ends with an error of the device.
struct Patience {
  u64 until;
  u32 turns = 0;
  static __device__ __forceinline__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
  __device__ __forceinline__ explicit Patience(u64 patience) : until(now() + patience) {}
  __device__ __forceinline__ void turn() { if ((++turns & 1023) == 0 && now() > until) __trap(); }
};

DEVICE void write_through(void* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DEVICE uint4 read_through(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from)
               : "memory");
  return v;
}
// Calls are counted in this rank's memory, so that a graph's replays are calls of their own. The last block counts.
DEVICE u32 begun(u32* count) {
  wait_for_predecessor();
  return *(volatile u32*)count;
}
DEVICE void ended(u32* count) {
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(count + 1, 1) == gridDim.x - 1) {
    count[1] = 0;
    *count += 1;
  }
  release_successor();
}

DEVICE void keep(float* v, uint4 x) {
  v[0] = __uint_as_float(x.x), v[1] = __uint_as_float(x.y), v[2] = __uint_as_float(x.z), v[3] = __uint_as_float(x.w);
}
DEVICE u32 sent(u32 x) { return __float_as_uint(canonical(__uint_as_float(x))); }
DEVICE bool absent(uint4 x) { return x.x == ABSENT || x.y == ABSENT || x.z == ABSENT || x.w == ABSENT; }

// Neighbours meet, level by level; then the bias and the one rounding.
DEVICE void finish(float (&v)[WORLD][W], const void* bias, int col, uint4 (&y)[RESULTS]) {
#pragma unroll
  for (int step = 1; step < WORLD; step *= 2) {  // order-critical: the upper levels of the contract's tree
#pragma unroll
    for (int i = 0; i < WORLD; i += 2 * step) {
#pragma unroll
      for (int j = 0; j < W; ++j) v[i][j] = __fadd_rn(v[i][j], v[i + step][j]);
    }
  }
  u32 words[4 * RESULTS];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (BIAS < 3) v[0][j] = __fadd_rn(v[0][j], load_as<BIAS>(bias, col + j));
    if (!OUT) words[j % (4 * RESULTS)] = __float_as_uint(canonical(v[0][j]));
    else if (j & 1) words[j / 2] = narrow<OUT>(v[0][j - 1]) | (u32)narrow<OUT>(v[0][j]) << 16;
  }
#pragma unroll
  for (int i = 0; i < RESULTS; ++i) y[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}

// A box is a row of words that another rank fills. A number that has arrived is no ABSENT any more, and becomes one again
// when it was read.
DEVICE uint4 received(char* from, Patience& waiting) {
  uint4 found;
  while (absent(found = read_through(from))) waiting.turn();
  write_through(from, make_uint4(ABSENT, ABSENT, ABSENT, ABSENT));
  return found;
}
DEVICE void send(char* to, uint4 x) { write_through(to, make_uint4(sent(x.x), sent(x.y), sent(x.z), sent(x.w))); }

// Pieces of 16 bytes of a thread's words, P to a word, side by side within a warp: a block exchanges what the same block of
// another rank does, so ranks never wait for a block that has no room yet.
template <int P, class F> DEVICE void each_piece(int first, int step, int words, const F& call) {
  const int lane = threadIdx.x & 31;
  for (int x = first - lane; x < words; x += step) {
#pragma unroll
    for (int i = 0; i < P; ++i)
      if (const int k = P * x + 32 * i + lane; k < P * words) call(k);
  }
}

// Every rank gets all partial sums. Two boxes of each rank take turns: who fills one a second time has had this rank's
// next call, so the first was read.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
one_shot(const __grid_constant__ Peers peers, const uint4* partial, uint4* out, const void* bias, int words, int across, int rank,
         i64 boxes, i64 box, u64 patience) {
  u32* count = (u32*)(peers.of[rank] + ONE_SHOT);
  const i64 at = boxes + (begun(count) & 1) * WORLD * box;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  each_piece<PARTS>(first, step, words, [&](int k) {
    const uint4 v = partial[k];
#pragma unroll
    for (int p = 1; p < WORLD; ++p) send(peers.of[(rank + p) % WORLD] + at + rank * box + 16ll * k, v);
  });
  Patience waiting(patience);
  for (int x = first; x < words; x += step) {
    float v[WORLD][W];
#pragma unroll
    for (int r = 0; r < WORLD; ++r) {
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        const int k = PARTS * x + i;
        keep(v[r] + 4 * i, r == rank ? partial[k] : received(peers.of[rank] + at + r * box + 16ll * k, waiting));
      }
    }
    uint4 y[RESULTS];
    finish(v, bias, x % across * W, y);
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) out[RESULTS * x + i] = y[i];
  }
  ended(count);
}

DEVICE u32* flag(const Peers& peers, int of, int kind, int from) {
  return (u32*)(peers.of[of] + FLAGS) + (kind * WORLD + from) * BLOCKS + blockIdx.x;
}
// What was written before is there: said to the same block of every other rank, and heard from it.
DEVICE void meet(const Peers& peers, int kind, int rank, u32 call, Patience& waiting) {
  __syncthreads();
  if (threadIdx.x < WORLD && threadIdx.x != rank) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(peers, threadIdx.x, kind, rank)), "r"(call) : "memory");
    u32 said;
    while (true) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(said) : "l"(flag(peers, rank, kind, threadIdx.x)) : "memory");
      if ((int)(said - call) >= 0) break;
      waiting.turn();
    }
  }
  __syncthreads();
}

// Every rank sums its share of the words, and sends it rounded; with `scatter` it keeps it. Partial sums go to boxes that
// take turns, as in `one_shot`; or, with `there`, they were copied to one place, and `partial` is this rank's share alone.
// Results go to one place: a rank sends them when it has this rank's partial sums, so those before were read.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
two_shot(const __grid_constant__ Peers peers, const uint4* partial, uint4* out, const void* bias, int words, int share,
         int across, int rank, i64 boxes, i64 box, i64 results, int there, int scatter, u64 patience) {
  u32* count = (u32*)(peers.of[rank] + TWO_SHOT);
  const u32 call = begun(count) + 1;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  const int begin = rank * share, own = min(share, words - begin);
  const i64 at = boxes + (there ? 0 : (call & 1) * WORLD * box);
  Patience waiting(patience);
  if (there) {
    meet(peers, ARRIVED, rank, call, waiting);
  } else {
    for (int p = 1; p < WORLD; ++p) {
      const int to = (rank + p) % WORLD, from = to * share, many = min(share, words - from);
      char* inbox = peers.of[to] + at + rank * box;
      each_piece<PARTS>(first, step, many, [&](int k) { send(inbox + 16ll * k, partial[(i64)PARTS * from + k]); });
    }
  }
  const uint4* mine = partial + (there ? 0 : (i64)PARTS * begin);
  uint4* to = out + (scatter ? 0 : (i64)RESULTS * begin);
#pragma unroll 2
  for (int x = first; x < own; x += step) {
    float v[WORLD][W];
#pragma unroll
    for (int r = 0; r < WORLD; ++r) {
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        const int k = PARTS * x + i;
        char* from = peers.of[rank] + at + r * box + 16ll * k;
        keep(v[r] + 4 * i, r == rank ? __ldcs(mine + k) : there ? __ldcs((const uint4*)from) : received(from, waiting));
      }
    }
    uint4 y[RESULTS];
    finish(v, bias, (begin + x) % across * W, y);
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
      const i64 k = (i64)RESULTS * (begin + x) + i;
      to[RESULTS * x + i] = y[i];
#pragma unroll
      for (int p = 1; p < WORLD; ++p)
        if (!scatter) write_through(peers.of[(rank + p) % WORLD] + results + 16 * k, y[i]);
    }
  }
  if (scatter && there) meet(peers, RETURNED, rank, call, waiting);  // nobody copies anew before all have read
  for (int p = 1; p < WORLD && !scatter; ++p) {
    const int of = (rank + p) % WORLD, many = min(share, words - of * share);
    const i64 from = (i64)RESULTS * of * share;
    each_piece<RESULTS>(first, step, many, [&](int k) {
      out[from + k] = received(peers.of[rank] + results + 16 * (from + k), waiting);
    });
  }
  ended(count);
}

// out[r] = words of rank r, 8 bytes each, that travel with the number of the call: 4 bytes of data, 4 of number, twice.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
gather(const __grid_constant__ Peers peers, const uint2* words, uint2* out, int many, int rank, i64 boxes, i64 box, u64 patience) {
  u32* count = (u32*)(peers.of[rank] + GATHER);
  const u32 call = begun(count) + 1;
  const i64 at = boxes + (call & 1) * WORLD * box;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int x = first; x < many; x += step) {
    const uint2 v = words[x];
#pragma unroll
    for (int p = 1; p < WORLD; ++p)
      write_through(peers.of[(rank + p) % WORLD] + at + rank * box + 16ll * x, make_uint4(v.x, call, v.y, call));
    out[(i64)rank * many + x] = v;
  }
  Patience waiting(patience);
  for (int p = 1; p < WORLD; ++p) {
    const int from = (rank + p) % WORLD;
    for (int x = first; x < many; x += step) {
      uint4 v;
      while (v = read_through(peers.of[rank] + at + from * box + 16ll * x), v.y != call || v.w != call) waiting.turn();
      out[(i64)from * many + x] = make_uint2(v.x, v.z);
    }
  }
  ended(count);
}
