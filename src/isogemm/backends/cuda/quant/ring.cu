// The ring of quant/many.cu, quant/apart.cu and quant/integers/wide.cu: STAGES buffers of KS times 64 of K that one thread fills,
// tile after tile.
//
// After include/elements.cu. CM blocks of a cluster take neighbouring rows of W. A record of super-blocks is SPAN times 64 of K; its
// scales come with each EVERY of these, into one of SLOTS; a block has BM rows of W and BX rows of x.

struct Block { int row, col; };  // the first row of W, and of x
struct Plan {
  int tiles_w, tiles_x, group;
  __device__ __forceinline__ int count() const { return tiles_w * tiles_x; }
  // Groups of `group` tiles of rows of x; inside a group rows of W are slowest, so that they are read once for all of it.
  __device__ __forceinline__ Block operator[](int t) const {
    const int width = group * tiles_w, first = t / width * group, high = min(tiles_x - first, group), in = t % width;
    return {(in / high * CM + (CM > 1 ? (int)cluster_rank() : 0)) * BM, (first + in % high) * BX};
  }
};

// Where in the ring, and among the slots of scales; it goes on from tile to tile.
struct Place {
  u32 stage, parity, slot, step;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
    if (SPAN > 1) {
      if ((step += KS) == SPAN) step = 0;
      if (step % EVERY == 0) slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
  }
};

// All tiles from t on, `count()` apart and `ahead` stages at first, by a producer's `bring_w` and `bring_x`. No kernel writes W: of the first tile it
// comes before the predecessor has ended, which a `late` launch need not wait for.
template <class Producer, class Count>
DEVICE void fill(const Producer& from, const Plan& plan, int t, Count count, int ahead, int iters, u32 empty, bool late) {
  const Place start{0, 1, 0, 0};
  Place p = start;
  for (int i = 0; i < ahead; ++i, p.next()) from.bring_w(plan[t], i, p);
  if (!late) wait_for_predecessor();
  p = start;
  for (; t < plan.count(); t += count()) {
    const Block block = plan[t];
#pragma unroll 1
    for (int i = 0; i < iters; ++i, p.next()) {
      if (--ahead < 0) {
        barrier_wait(empty + 8 * p.stage, p.parity);
        from.bring_w(block, i, p);
      }
      from.bring_x(block, i, p);
    }
  }
  release_successor();
  if (CM > 1) drain(empty, STAGES, p.stage, p.parity);
}
