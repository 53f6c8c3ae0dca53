// How quant/integers/few.cu walks a span of K: codes of W and x to sums of blocks, and a chain over these.
//
// After quant/integers/steps.cu and the constants of quant/integers/few.cu.

// From the first row of these on. FIXED: there are NT tiles of 8 rows, and steps are constants.
struct Activations {
  const u8* codes;
  const float* scales;
  const int* sums;
  int tiles, m;  // of 8 rows, in all; rows from the first one on
  u32 lane;
  __device__ __forceinline__ i64 rows() const { return FUSED == 1 ? 1 : FIXED ? 8 * NT : 8 * tiles; }
  __device__ __forceinline__ i64 code_rows() const { return FUSED ? FUSED : rows(); }
  // Of 64 of K and tile i; nothing where a column is past m.
  __device__ __forceinline__ uint4 codes_of(i64 chunk, int i) const {
    if (!STAGED && 8 * i + (int)lane / 4 >= m) return make_uint4(0, 0, 0, 0);
    return *(const uint4*)(codes + chunk * (64 * code_rows()) + (32 * i + lane) * 16);
  }
  // Column 2 t of tile i; in place of tiles past the last one, the first.
  __device__ __forceinline__ int column(int i) const {
    return FUSED == 1 ? 0 : (8 * i < m ? 8 * i : 0) + 2 * (lane % 4);
  }
};

template <int N> struct Turns {
  float4* slot;  // [N][32]
  int own, next;  // barriers
  __device__ __forceinline__ void take(float (&acc)[N][4], u32 lane) const {
    asm volatile("bar.sync %0, 64;" ::"r"(own) : "memory");
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float4 v = slot[i * 32 + lane];
      acc[i][0] = v.x, acc[i][1] = v.y, acc[i][2] = v.z, acc[i][3] = v.w;
    }
  }
  __device__ __forceinline__ void give(const float (&acc)[N][4], u32 lane) const {
#pragma unroll
    for (int i = 0; i < N; ++i) slot[i * 32 + lane] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    asm volatile("bar.arrive %0, 64;" ::"r"(next) : "memory");
  }
};

#if Q_BLOCK == 32
// d_w * d_x of 16 rows of W and 8 columns is an outer product of float16 numbers, each entry exact in float32: one
// instruction of the tensor cores, with the blocks of a span along its K, and zeros for all but one in operand B.
DEVICE void outer(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}
// Scales of a span. Lane 4 g + t has those of chunk t: W's of rows g and g + 8, x's of column g of each tile.
template <int N> struct Scales {
  u32 d[2], o[2], x[N][2];  // x: of the first block, and of the second, each in its half
  __device__ __forceinline__ void load_x(i64 first, int chunks, const Activations& a) {
    const int t = a.lane % 4;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int row = FUSED == 1 ? 0 : (8 * i < a.m ? 8 * i : 0) + a.lane / 4;
      x[i][1] = t < chunks ? ((const u32*)a.scales)[(first + t) * a.rows() + row] : 0;
    }
  }
  __device__ __forceinline__ void load_w(const u8* stage, int chunks, const Activations& a) {
    const int t = a.lane % 4, g = a.lane / 4;
    d[0] = d[1] = o[0] = o[1] = 0;
    if (t < chunks) {
      const u8* p = stage + t * Q_RECORD_BYTES + Q_FLOATS + 4 * Q_FLOATS_EACH * g;
      if (Q_FLOATS_EACH == 1) {
        const u32 even = *(const u32*)p, odd = *(const u32*)(p + 32);
        d[0] = __byte_perm(even, odd, 0x5410), d[1] = __byte_perm(even, odd, 0x7632);
      } else {
        const uint2 even = *(const uint2*)p, odd = *(const uint2*)(p + 64);
        d[0] = __byte_perm(even.x, odd.x, 0x5410), d[1] = __byte_perm(even.y, odd.y, 0x5410);
        o[0] = __byte_perm(even.x, odd.x, 0x7632), o[1] = __byte_perm(even.y, odd.y, 0x7632);
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i][0] = x[i][1] & 0xffffu, x[i][1] &= 0xffff0000u;
  }
  __device__ __forceinline__ u32 of(int i, int c, int q, u32 lane) const { return lane % 4 == c ? x[i][q] : 0; }
};
// The sum of a block, and what it is to be multiplied with.
template <int N> struct Sums {
  int s[N][4];
  float d[N][4], o[N][4], t[N][2];
  // Block q of chunk c of a span, the `block`th of all.
  __device__ __forceinline__ void make(const Fours& four, const uint4 (&b)[N], int c, int q, i64 block,
                                       const Scales<N>& scales, const Activations& a) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dot_short(s[i], four, q, &b[i].x);
      const u32 x = scales.of(i, c, q, a.lane);
      outer(d[i], scales.d[0], scales.d[1], x);
      if (!SUMS) continue;
      outer(o[i], scales.o[0], scales.o[1], x);
      const float* sum = (const float*)a.sums + block * a.rows() + a.column(i);
      const float2 two = EACH == 2 ? make_float2(*sum, 0.0f) : *(const float2*)sum;
      t[i][0] = two.x, t[i][1] = two.y;
    }
    // Left to itself the compiler waits for one sum after the other.
#pragma unroll
    for (int i = 0; i < N * 4; i += EACH) asm volatile("" : "+r"(s[i / 4][i % 4]));
  }
  // float(S), in place.
  __device__ __forceinline__ void convert() {
    constexpr float DOWN = 1.0f / (1 << RAISED);
#pragma unroll
    for (int i = 0; i < N * 4; i += EACH) {
      int& at = s[i / 4][i % 4];
      at = __float_as_int(__fmaf_rn(__int_as_float(at), DOWN, -12582912.0f * DOWN));  // exact
      if (held_of(N) == BLOCKS) asm volatile("" : "+r"(at));
    }
  }
  // order-critical: S before T.
  __device__ __forceinline__ void end(float (&acc)[N][4]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int e = 0; e < 4; e += EACH) acc[i][e] = __fmaf_rn(__int_as_float(s[i][e]), d[i][e], acc[i][e]);
#pragma unroll
      for (int e = 0; e < 4 && SUMS; e += EACH) acc[i][e] = __fmaf_rn(t[i][e % 2], o[i][e], acc[i][e]);
    }
  }
};
#endif

template <bool WHOLE, int N> DEVICE void load_codes(uint4 (&b)[N], i64 chunk, bool in, const Activations& a) {
#pragma unroll
  for (int i = 0; i < N; ++i) b[i] = WHOLE || in ? a.codes_of(chunk, i) : make_uint4(0, 0, 0, 0);
}
// One span: its sums, then, when it is this warp's turn, its part of the chain.
template <bool WHOLE, int N, class Take>
DEVICE void walk(float (&acc)[N][4], const u8* stage, i64 span, int chunks, const Activations& a, u32 bar, u32 parity,
                 Take take) {
  // From memory: before W is waited for.
  uint4 before[STAGED ? 1 : CHUNKS][N];
#pragma unroll
  for (int c = 0; c < CHUNKS && !STAGED; ++c)
    load_codes<WHOLE>(before[STAGED ? 0 : c], span * CHUNKS + c, c < chunks, a);
#if Q_BLOCK == 32
  Scales<N> scales;
  scales.load_x(span * CHUNKS, chunks, a);
#endif
  barrier_wait(bar, parity);
#if Q_BLOCK == 32
  scales.load_w(stage, chunks, a);
  constexpr int HELD = held_of(N);
  Sums<N> held[HELD];
  Fours four;
  uint4 b[N];
#pragma unroll
  for (int next = 0; next < BLOCKS + HELD - 1; ++next) {
    const int c = next / 2, last = next - HELD + 1;
    if (next < BLOCKS && (WHOLE || c < chunks)) {
      if (next % 2 == 0) {
        if (STAGED) load_codes<WHOLE>(b, span * CHUNKS + c, true, a);
#pragma unroll
        for (int i = 0; i < N && !STAGED; ++i) b[i] = before[STAGED ? 0 : c][i];
        fours_of(four, stage + c * Q_RECORD_BYTES, a.lane);
      }
      held[next % HELD].make(four, b, c, next % 2, span * BLOCKS + next, scales, a);
    }
    if (last < 0) continue;
    if (last == 0) {
#pragma unroll
      for (int h = 0; h < HELD && HELD == BLOCKS; ++h) held[h].convert();
      take(acc);
    }
    if (!WHOLE && last / 2 >= chunks) continue;
    if (HELD < BLOCKS) held[last % HELD].convert();
    held[last % HELD].end(acc);
  }
#else
  int sums[N][4] = {}, mins[N][4] = {};
  float x[N][2];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Pair two = pair_of<1>(a.scales + span * a.rows() + a.column(i));
    x[i][0] = two.d[0], x[i][1] = two.d[1];
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    Fours four;
    uint4 b[N];
    if (STAGED) load_codes<WHOLE>(b, span * CHUNKS + c, c < chunks, a);
#pragma unroll
    for (int i = 0; i < N && !STAGED; ++i) b[i] = before[STAGED ? 0 : c][i];
    fours_of(four, stage + c * Q_STEP_BYTES, a.lane);
    const int* of = a.sums + (span * CHUNKS + c) * STEP_WORDS * a.rows();
    u32 ints[STEP_SUBS];
#pragma unroll
    for (int j = 0; j < STEP_SUBS; ++j) {
      ints[j] = ints_of(stage, STEP_SUBS * c + j, a.lane / 4);
#pragma unroll
      for (int i = 0; i < N; ++i) add_sub(sums[i], four, b[i], j, ints[j]);
    }
#pragma unroll
    for (int j = 0; j < STEP_SUBS && SUMS; j += 2)
#pragma unroll
      for (int i = 0; i < N; ++i) add_mins(mins[i], mins_of(ints[j], ints[j + 1]), of + j / 2 * a.rows() + a.column(i));
  }
  const Floats w = floats_of(stage, 0, a.lane / 4);
  take(acc);
#pragma unroll
  for (int i = 0; i < N; ++i) chain_long(acc[i], sums[i], mins[i], w, x[i]);
#endif
}
