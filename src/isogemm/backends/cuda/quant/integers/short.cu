// Consumers of quant/integers/wide.cu for blocks of 32: a sum is two instructions, and each has a step of the chain.
//
// A unit is a block of 32, for all columns or (HALVES 2) half of them. DEPTH units are in registers: while tensor cores
// multiply for one, the chain of an earlier one is walked.

constexpr int WIDTH = BN / 2 / HALVES, AHEAD = 3 - HALVES;  // elements of a unit; stages of a step
struct Line { float4 v[WIDTH / 8]; };

struct Consumer : Reader {
  __device__ __forceinline__ void fragments(u32 (&a)[2][4], const Words& w, int block) const {
#pragma unroll
    for (int r = 0; r < 8; ++r) a[r / 4][r % 4] = code_pair(w, 2 * (2 * block + r / 4) + r % 2, r % 4 / 2);
  }
  __device__ __forceinline__ void multiply(float (&s)[WIDTH], const u32 (&a)[2][4], u32 stage, int block,
                                           int half) const {
    const u64 x = descriptor<false>(ring + stage * STAGE_BYTES + half * (X_BYTES / HALVES)) + 4 * block;
    wgmma_fence();
    mma(s, a[0], x, 0);
    mma(s, a[1], x + 2, 1);
    wgmma_commit();
  }
  __device__ __forceinline__ const float4* line_at(u32 stage, int line, int half) const {
    return (const float4*)(memory + stage * STAGE_BYTES + LINES_AT + (line * BN + half * (BN / HALVES)) * 4) + lane % 4;
  }
  // Scales of x.
  __device__ __forceinline__ Line line_of(u32 stage, int block, int half) const {
    const float4* x = line_at(stage, block * (LINES / 2), half);
    Line d;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) d.v[j] = x[4 * j];
    return d;
  }
  // order-critical: blocks ascend, S before T.
  __device__ __forceinline__ void chains(float (&acc)[WIDTH], float (&s)[WIDTH], const Floats& w, const Line& line,
                                         u32 stage, int block, int half) const {
    pin(s);
    const float4* more = line_at(stage, block * (LINES / 2) + 1, half);
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const float d[4] = {line.v[j].x, line.v[j].y, line.v[j].z, line.v[j].w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& a = acc[8 * j + e];
        a = __fmaf_rn(s[8 * j + e], __fmul_rn(w.d[e / 2 % 2], d[e / 4 * 2 + e % 2]), a);
      }
      if (!OFFSET) continue;
      const float4 four = more[4 * j];  // T * d_x is exact: the product's order does not matter
      const float t[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) acc[8 * j + e] = __fmaf_rn(w.o[e / 2 % 2], t[e / 4 * 2 + e % 2], acc[8 * j + e]);
    }
  }
  template <int MOST> __device__ __forceinline__ void wait_until(int pending) const {
    if (pending == MOST) wgmma_wait<MOST>();
    else if constexpr (MOST > 0) wait_until<MOST - 1>(pending);
  }
  // N buffers. Nothing is under way from step to step: the compiler would make each product wait for the one before.
  template <int N> __device__ __forceinline__ void step(float (&acc)[HALVES][WIDTH]) {
    constexpr int UNITS = 2 * HALVES * N;
    float s[DEPTH][WIDTH];
    u32 a[2 * N][2][4], stage[N];
    Words w[N];
    Floats f[2 * N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      barrier_wait(full + 8 * at.stage, at.parity);
      load_words_together<false>(w[i], codes(), lane);
      f[2 * i] = floats_of(codes(), 0, lane / 4), f[2 * i + 1] = floats_of(codes(), 1, lane / 4);
      stage[i] = at.stage, at.next();
    }
#pragma unroll
    for (int u = 0; u < UNITS + DEPTH - 1; ++u) {
      if (u < UNITS) {
        if (u % HALVES == 0) fragments(a[u / HALVES], w[u / HALVES / 2], u / HALVES % 2);
        multiply(s[u % DEPTH], a[u / HALVES], stage[u / HALVES / 2], u / HALVES % 2, u % HALVES);
      }
      const int v = u - DEPTH + 1;
      if (v < 0 || v >= UNITS) continue;
      const Line d = line_of(stage[v / HALVES / 2], v / HALVES % 2, v % HALVES);
      wait_until<DEPTH - 1>(min(DEPTH, UNITS - v) - 1);
      chains(acc[v % HALVES], s[v % DEPTH], f[v / HALVES], d, stage[v / HALVES / 2], v / HALVES % 2, v % HALVES);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) release(stage[i]);
  }
  __device__ __forceinline__ void walk(float (&acc)[HALVES][WIDTH], int iters) {
    int i = 0;
#pragma unroll 1
    for (; i + AHEAD <= iters; i += AHEAD) step<AHEAD>(acc);
    if (AHEAD > 1 && i < iters) step<1>(acc);
  }
};
