// A ring's stage of one operand: KS times 64 of K by the tensor copy engine, and descriptors of what lies in it.
#include "include/hopper_ptx.cu"

constexpr int KE = 64;  // elements of K in 128 bytes

// One operand's share of a stage. `k` counts elements of K; SPLIT blocks of the cluster load one part each, `part` is ours:
// some lines of every chunk of 64 of K, a copy for each chunk; or where it is WHOLE some chunks of all lines, in one copy, and
// then no map along K has items. (A producer shares its scheduler with a warp that multiplies: what it issues delays that.)
// LINE: rows that a line across K has.
template <bool MN, int ROWS, int SPLIT, bool WHOLE = false, int LINE = 64>
DEVICE void load_operand(const Map* map, u32 to, u32 bar, int row, int k, int z, u32 part, u16 mask, u64 policy) {
  constexpr int BYTES = (MN ? (ROWS + LINE - 1) / LINE * LINE : ROWS) * 128, SHARE = WHOLE ? 0 : (MN ? 64 : ROWS) / SPLIT;
  static_assert(!WHOLE || KS % SPLIT == 0 && (!MN || ROWS <= 64));
#pragma unroll
  for (int i = 0; i < (WHOLE ? 1 : KS); ++i) {
    const int chunk = WHOLE ? part * (KS / SPLIT) : i, kk = k + chunk * KE;
#pragma unroll
    for (int j = 0; j < (MN ? (ROWS + LINE - 1) / LINE : 1); ++j) {
      const u32 at = to + chunk * BYTES + j * 8192 + part * SHARE * (MN ? 2 * LINE : 128);
      const int c0 = MN ? row + 64 * j : WHOLE ? 0 : kk, c1 = (MN ? kk : row) + part * SHARE, c2 = WHOLE && !MN ? kk / KE : z;
      if (SPLIT > 1) tma_multicast(at, map, bar, c0, c1, c2, mask, policy);
      else tma_load(at, map, bar, c0, c1, c2, policy);
    }
  }
}

// The descriptor `step` units of 16 bytes further on: all of shared memory is within its lower half.
DEVICE u64 further(u64 d, u32 step) { return (d & ~0xffffffffull) | (u32)(d + step); }
