// What a block of a float32 product walks: BM x BN tiles, over panels of BK of K.
//
// A block has one tile, or, with SHARED, a share of all tiles' panels, laid end to end (stream-K): so many that no more than two
// blocks share a tile, and none is idle in a last round. Of a tile that two share, the sums that the first leaves are where
// the second begins, so its chains are what they were. Every block begins with what another waits for, and waits itself at
// its own end, for what was begun long before: by a block with a smaller number, and GPUs begin blocks in the order of their
// numbers, so that none waits for what has not begun, however few run at once. Blocks come in teams, whose size divides the
// tiles along m: they walk the same columns of B at the same time, as these come from memory once.

static_assert(!(SHARED && LEAF));
constexpr int GROUP = 8;  // tiles of m that share columns of B in L2

// part(m0, n0, item, start, stop, last): a tile's sums over k from `start` to `stop`, the block's last or not.
template <class F>
__device__ __forceinline__ void each_part(int m, int n, int k, int batch, int team, F part) {
  const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
  if (SHARED) {
    const int panels = (k + BK - 1) / BK, teams_m = tiles_m / team, columns = teams_m * tiles_n;  // of a tile; of an item
    const int teams = gridDim.x / team, ours = blockIdx.x / team, member = blockIdx.x % team;
    const i64 all = (i64)columns * batch * panels;
    const int first = (int)(all * ours / teams), end = (int)(all * (ours + 1) / teams);
#pragma unroll 1
    for (int t = (end - 1) / panels, last = first / panels; t >= last; --t) {
      const int begun = t * panels, left = end - begun, in = t % columns;
      const int m0 = (in % teams_m * team + member) * BM, n0 = in / teams_m * BN;
      part(m0, n0, (i64)(t / columns), max(first - begun, 0) * BK, left < panels ? left * BK : k, t == last);
    }
  } else {
    const int first = blockIdx.x / (GROUP * tiles_n) * GROUP, high = min(tiles_m - first, GROUP), in = blockIdx.x - first * tiles_n;
    const i64 item = blockIdx.y + (i64)blockIdx.z * gridDim.y;
    if (item < batch) part((first + in % high) * BM, in / high * BN, item, 0, k, true);
  }
}

// Sums on their way from the block that begins a tile to the one that ends it, in the next team.
template <int THREADS>
struct Handover {
  float* sums;  // [block][sum of a thread][thread]
  u32* flags;   // [block], zeros before the launch
  int team;
  static __device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
  __device__ __forceinline__ void give(const float (&acc)[TM][TN], int thread) const {
    float* at = sums + (i64)blockIdx.x * (BM * BN) + thread;
#pragma unroll
    for (int i = 0; i < TM * TN; ++i) __stcg(at + i * THREADS, acc[i / TN][i % TN]);
    meet();
    if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
  }
  __device__ __forceinline__ void take(float (&acc)[TM][TN], int thread) const {
    const i64 from = (i64)blockIdx.x - team;
    u32 given = thread;
    while (given == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(given) : "l"(flags + from) : "memory");
    meet();
    const float* at = sums + from * (BM * BN) + thread;
#pragma unroll
    for (int i = 0; i < TM * TN; ++i) acc[i / TN][i % TN] = __ldcg(at + i * THREADS);
  }
};
