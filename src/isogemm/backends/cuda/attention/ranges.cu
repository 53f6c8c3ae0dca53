// Ranges of keys that a mask shows to queries, and the order in which queries are taken that share no leaves.
//
//   start  the first key that a query sees, from which its leaves are counted; stop, the one behind the last; 0, 0 of none
//
// Queries share leaves where their starts are whole leaves apart: a leaf in which a query sees nothing changes none of its
// bits. A batch entry whose queries all do is one range, `first` to `last`, for the other kernels; for one whose queries do
// not, that range is empty, `apart` is 1, and `order` has the tokens by the place in a leaf where they start: those of a
// place in tiles of their own, filled up with -1.
#include "attention/common.cu"

DEVICE bool is_seen(const unsigned char* mask, i64 at) {
  if (MASK == 1) return mask[at] != 0;
  constexpr float least = MASK_KIND == 0 ? -0x1.fffffep+127f : MASK_KIND == 1 ? -0x1.fep+127f : -65504.0f;
  return !(load_as<MASK_KIND>(mask, at) <= least);
}

// start and stop [entries, heads, tokens]: a warp has a line of the mask, 16 keys of a lane under way at a time.
extern "C" __global__ void __launch_bounds__(256)
attention_ranges(const unsigned char* mask, int* start, int* stop, i64 mask_b, i64 mask_h, i64 mask_t, i64 mask_k, int heads,
                 int tokens, int lines, int tk) {
  wait_for_predecessor();
  release_successor();
  const int line = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (line >= lines) return;
  const i64 at = line / tokens / heads * mask_b + line / tokens % heads * mask_h + line % tokens * mask_t;
  int first = tk, last = 0;
  for (int from = 0; from < tk && first == tk; from += 512) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int key = from + 32 * i + lane;
      if (key < tk && is_seen(mask, at + key * mask_k)) first = min(first, key);
    }
    first = __reduce_min_sync(~0u, first);
  }
  for (int from = (tk - 1) / 512 * 512; from + 512 > first && first < tk && last == 0; from -= 512) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int key = from + 32 * i + lane;
      if (key < tk && is_seen(mask, at + key * mask_k)) last = max(last, key + 1);
    }
    last = __reduce_max_sync(~0u, last);
  }
  if (lane == 0) start[line] = last ? first : 0, stop[line] = last;
}

// A block has a head of the mask, and TILE tokens to a tile of the `slots` of its order. `tokens` is 1 where one line of the
// mask serves all `tq` of them.
extern "C" __global__ void __launch_bounds__(256)
attention_order(const int* start, const int* stop, int* first, int* last, int* apart, int* order, int heads, int tokens, int tq,
                int slots) {
  constexpr int PIECE = 2048;
  __shared__ int bounds[4];  // the least and the largest place in a leaf, the least start, the largest stop
  __shared__ int counts[LEAF];
  __shared__ unsigned char places[PIECE];
  const int head = blockIdx.x, item = blockIdx.y, thread = threadIdx.x;
  if (thread < 4) bounds[thread] = thread % 2 ? 0 : 0x7fffffff;
  wait_for_predecessor();
  release_successor();
  __syncthreads();
  const int *starts = start + (i64)item * heads * tokens, *stops = stop + (i64)item * heads * tokens;
  for (int i = thread; i < heads * tokens; i += 256)
    if (starts[i] < stops[i]) {
      atomicMin(&bounds[0], starts[i] % LEAF), atomicMax(&bounds[1], starts[i] % LEAF);
      atomicMin(&bounds[2], starts[i]), atomicMax(&bounds[3], stops[i]);
    }
  __syncthreads();
  const bool together = bounds[0] >= bounds[1];
  if (head == 0 && thread == 0) {
    const bool some = together && bounds[3];
    first[item] = some ? bounds[2] : 0, last[item] = some ? bounds[3] : 0, apart[item] = !together;
  }
  if (together) return;
  starts += head * tokens, order += ((i64)item * heads + head) * slots;
  for (int i = thread; i < slots; i += 256) order[i] = -1;
  int at = 0;
  for (int pass = 0; pass < 2; ++pass) {  // a thread counts the tokens of a place, then writes them in ascending order
    for (int from = 0; from < tq; from += PIECE) {
      const int piece = min(PIECE, tq - from);
      __syncthreads();
      for (int i = thread; i < piece; i += 256) places[i] = starts[tokens > 1 ? from + i : 0] % LEAF;
      __syncthreads();
      for (int i = 0; i < piece && thread < LEAF; ++i)
        if (places[i] == thread) {
          if (pass) order[at] = from + i;
          ++at;
        }
    }
    if (thread < LEAF) counts[thread] = (at + TILE - 1) / TILE * TILE;
    __syncthreads();
    at = 0;
    for (int i = 0; i < thread && thread < LEAF; ++i) at += counts[i];
  }
}
