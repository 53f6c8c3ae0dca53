// Rotations of one or two tensors in one launch, blockIdx.y of them; with NORM, of rows that a norm went over and rounded.
//
// Without NORM, a thread has N pairs. With it, a warp has EACH rows at a time, in H groups of 128 elements, which meet their
// partners in shared memory. VEC: contiguous rows, halves of a multiple of N, aligned.

#include "rows/common.cu"

struct Columns {
  i64 x[2], cos, sin, w[2];
};
struct Tensors {
  const void* x[2];
  const void *cos, *sin;
  void* out[2];
  const void* w[2];
};

#if !NORM
constexpr int N = VEC ? 8 : 1;

DEVICE void turn(const Place& place, const Columns& column, const Tensors& of, int which, int half, float) {
  const u32 groups = half / N, index = blockIdx.x * 256 + threadIdx.x, row = index / groups;
  if (row >= place.rows) return;
  const int i = (index - row * groups) * N;
  const int first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + N : half + i;
  const Spot spot = place.spot(row);
  const i64 from = place.at(0, spot), to = (i64)row * 2 * half;
  float a[N], b[N], c[N], s[N], y[2 * N];
  fetch<TX, N>(of.x[which], from, column.x[which], first, a);
  fetch<TX, N>(of.x[which], from, column.x[which], second, b);
  fetch<TC, N>(of.cos, place.at(1, spot), column.cos, i, c);
  fetch<TS, N>(of.sin, place.at(2, spot), column.sin, i, s);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int k = 2 * j;
    const float p = !INTERLEAVED ? a[j] : k < N ? a[k % N] : b[k % N];
    const float q = !INTERLEAVED ? b[j] : k + 1 < N ? a[(k + 1) % N] : b[(k + 1) % N];
    const float turned = sub(mul(p, c[j]), mul(q, s[j])), other = add(mul(q, c[j]), mul(p, s[j]));
    y[INTERLEAVED ? k : j] = turned;
    y[INTERLEAVED ? k + 1 : N + j] = other;
  }
  give<TO, N>(of.out[which], to + first, y);
  give<TO, N>(of.out[which], to + second, y + N);
}
#else
// ANGLES: halves of a multiple of four, and tables of which four can be read at once.
DEVICE void turn(const Place& place, const Columns& column, const Tensors& of, int which, int half, float eps) {
  __shared__ float partners[TEAMS][EACH][H * 128];
  const int n = 2 * half, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 count = (u32)place.rows, first = (blockIdx.x * TEAMS + warp) * EACH;
  if (first >= count) return;
  Four<TX> held[EACH][H];
  i64 cosines[EACH], sines[EACH];
#pragma unroll
  for (int r = 0; r < EACH; ++r) {
    const Spot spot = place.spot(min(first + r, count - 1));
    const i64 from = place.at(0, spot);
    cosines[r] = place.at(1, spot), sines[r] = place.at(2, spot);
#pragma unroll
    for (int h = 0; h < H; ++h) read<TX>(of.x[which], from, column.x[which], h * 128 + lane * 4, n, held[r][h]);
  }
  float weight[H][4];
#pragma unroll
  for (int h = 0; h < H; ++h) several<TW>(of.w[which], 0, column.w[which], h * 128 + lane * 4, n, weight[h]);
#pragma unroll
  for (int r = 0; r < EACH; ++r) {
    float v[H][4], lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < H; ++h) {
      open<TX>(held[r][h], v[h]);
#pragma unroll
      for (int j = 0; j < 4; ++j) lanes[j] = fma_(v[h][j], v[h][j], lanes[j]);
    }
    const float root = __frcp_rn(__fsqrt_rn(add(__fdiv_rn(meet(lanes), (float)n), eps)));
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const int i = h * 128 + lane * 4;
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[j] = mul(v[h][j], root);
        y[j] = rounded<TX>(TW == NONE ? y[j] : mul(y[j], weight[h][j]));
      }
      *(float4*)(partners[warp][r] + i) = make_float4(y[0], y[1], y[2], y[3]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < EACH; ++r) {
    const u32 row = first + r;
    if (row >= count) continue;
    const float* own = partners[warp][r];
    const i64 to = (i64)row * n;
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const int i = h * 128 + lane * 4;
      if (i >= n) continue;
      float y[4], c[4], s[4];
      if (ANGLES) {  // four neighbours of one half, and four of the other
        const bool second = i >= half;
        several<TC>(of.cos, cosines[r], 1, second ? i - half : i, half, c);
        several<TS>(of.sin, sines[r], 1, second ? i - half : i, half, s);
        const float4 kept = *(const float4*)(own + i), turned = *(const float4*)(own + (second ? i - half : i + half));
        const float a[4] = {kept.x, kept.y, kept.z, kept.w}, b[4] = {turned.x, turned.y, turned.z, turned.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = add(mul(a[j], c[j]), second ? mul(b[j], s[j]) : -mul(b[j], s[j]));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int e = i + j;
          if (e >= n) continue;
          const bool second = INTERLEAVED ? e & 1 : e >= half;
          const int at = INTERLEAVED ? e >> 1 : second ? e - half : e;
          const int partner = INTERLEAVED ? e ^ 1 : second ? e - half : e + half;
          const float c = value<TC>(of.cos, cosines[r] + at * column.cos), s = value<TS>(of.sin, sines[r] + at * column.sin);
          const float kept = mul(own[e], c), turned = mul(own[partner], s);
          y[j] = second ? add(kept, turned) : sub(kept, turned);
        }
      }
      give<TO>(of.out[which], to + i, i, n, y);
    }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(256)
rope(const void* x0, const void* x1, const void* cos, const void* sin, const void* w0, const void* w1, void* out0, void* out1,
     const __grid_constant__ Place place0, const __grid_constant__ Place place1, i64 x0_c, i64 x1_c, i64 cos_c, i64 sin_c,
     i64 w0_c, i64 w1_c, int half, float eps) {
  const Columns column = {{x0_c, x1_c}, cos_c, sin_c, {w0_c, w1_c}};
  const Tensors of = {{x0, x1}, cos, sin, {out0, out1}, {w0, w1}};
  wait_for_predecessor();
  release_successor();
  if (blockIdx.y) turn(place1, column, of, 1, half, eps);
  else turn(place0, column, of, 0, half, eps);
}
