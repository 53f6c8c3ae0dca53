// Sums over rows: out[c] = ((start[c] + t[0, c]) + t[1, c]) + ..., with t = dy, dy * (x * r) or dy * ((x - mean) * r); for each
// leaf of so many rows one, in a row of `out`.
//
// A block has WIDE columns of a leaf. Warps read ahead and leave terms of TILE rows at a time in shared memory, one warp adds them in order,
// a column a thread. A sum takes 4.35 cycles, and up to half as much again beside other warps of its scheduler: so there are
// none. Four rows' terms of a column lie side by side, one load for four sums: a warp waits for loads by six counters, too few
// for one each. -0 stands for rows behind the last one: it changes no sum, not even -0.

#include "rows/common.cu"

#define READERS (WIDE == 16 ? 384 : 480)  // threads that read: of each four warps, which are on a scheduler each, three
#define EACH 4
#define ACROSS (WIDE / 4)  // threads of a row
#define TILE (READERS / ACROSS * EACH)
extern __shared__ float4 memory[];  // two tiles of TILE / 4 x WIDE

struct Columns {
  i64 x, d, out;
};
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(READERS + 32) : "memory"); }

struct Terms {
  Four<TX> x[TERM ? EACH : 1];
  Four<TD> d[EACH];
  float2 stats[EACH];  // of a row: 1 / root, mean
  // EACH rows from `first` to `end`, of columns from c on. Where rows lie takes long to say: of some dimensions a thread says it of one.
  __device__ __forceinline__ void begin(const void* px, const void* pd, const float2* rows, const Place& place,
                                        const Columns& column, u32 first, u32 end, int c, int n) {
    const u32 last = end - 1;
    const Spot own = place.spot(min(first + threadIdx.x % EACH, last));
    const i64 own_x = place.at(0, own), own_d = place.at(1, own);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const u32 row = min(first + k, last);
      read<TD>(pd, DIMS == 1 ? place.at(1, row) : __shfl_sync(~0u, own_d, k, ACROSS), column.d, c, n, d[k]);
      if constexpr (TERM > 0) {
        read<TX>(px, DIMS == 1 ? place.at(0, row) : __shfl_sync(~0u, own_x, k, ACROSS), column.x, c, n, x[k]);
        stats[k] = __ldg(rows + row);
      }
    }
  }
  // Terms of the four columns, ACROSS apart.
  __device__ __forceinline__ void finish(float4* to, u32 first, u32 end) const {
    float t[EACH][4], v[4];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      open<TD>(d[k], t[k]);
      if constexpr (TERM > 0) {
        open<TX>(x[k], v);
#pragma unroll
        for (int j = 0; j < 4; ++j) t[k][j] = mul(t[k][j], mul(TERM == 2 ? sub(v[j], stats[k].y) : v[j], stats[k].x));
      }
      if (first + k >= end) t[k][0] = t[k][1] = t[k][2] = t[k][3] = -0.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j * ACROSS] = make_float4(t[0][j], t[1][j], t[2][j], t[3][j]);
  }
};

extern "C" __global__ void __launch_bounds__(READERS / 3 * 4)
columns(const void* x, const void* d, const float2* stats, void* out, const __grid_constant__ Place place,
        i64 x_c, i64 d_c, i64 out_c, i64 leaf, int n, int start) {
  const Columns column = {x_c, d_c, out_c};
  const u32 blocks = (n + WIDE - 1) / WIDE, number = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const u32 begin = number * (u32)leaf, end = min(begin + (u32)leaf, place.rows);
  wait_for_predecessor();
  release_successor();
  const int tiles = (int)((end - begin + TILE - 1) / TILE), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp % 4 < 3) {
    if (!tiles) return;
    const int reader = (warp - warp / 4) * 32 + lane, across = reader % ACROSS, row = reader / ACROSS * EACH;
    const int c = block * WIDE + across * 4;
    float4* to = memory + row * ACROSS + across;
    Terms terms;
    terms.begin(x, d, stats, place, column, begin + row, end, c, n);
    for (int tile = 0; tile < tiles; ++tile) {
      const u32 first = begin + tile * TILE + row;
      terms.finish(to + (tile & 1) * TILE * ACROSS, first, end);
      if (tile + 1 < tiles) terms.begin(x, d, stats, place, column, first + TILE, end, c, n);
      meet();
    }
    return;
  }
  if (warp != 3) return;
  const int c = block * WIDE + lane % ACROSS * 4 + lane / ACROSS % 4;
  out = behind<TO>(out, number * (i64)n);
  float sum = start && c < n ? ((const float*)out)[c * column.out] : 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    meet();
    const float4* t = memory + (tile & 1) * TILE * ACROSS + lane % WIDE;
    float4 ahead[8];  // half of them is read while the other half is added
#pragma unroll
    for (int k = 0; k < 4; ++k) ahead[k] = t[k * WIDE];
#pragma unroll
    for (int first = 0; first < TILE / 4; first += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (first + 4 < TILE / 4) ahead[(first + 4 + k) % 8] = t[(first + 4 + k) * WIDE];
        const float4 next = ahead[(first + k) % 8];
        sum = add(add(add(add(sum, next.x), next.y), next.z), next.w);
      }
    }
  }
  if (lane < WIDE && c < n) put<TO>(out, c * column.out, sum);
}
