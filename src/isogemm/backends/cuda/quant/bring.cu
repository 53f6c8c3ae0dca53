// What one thread brings to the ring of quant/ring.cu, for quant/many.cu and quant/apart.cu: of each 64 of K, BX rows of x and,
// KS * X_BYTES further on, codes of TILES tiles of W; scales of super-blocks into slots behind the ring, with the first of EVERY. What
// lies outside of x and of W comes as zeros. One copy brings a stage of W, and, where K is WHOLE times 64, one a stage of x: the
// fewer the faster.
struct Producer {
  const Map *map_x, *map_w, *map_s;  // of x, of W's codes (and scales, where they are together), of scales
  u32 ring, full;

  __device__ __forceinline__ void bring_w(const Block& tile, int i, const Place& p) const {
    const bool scales = SPAN > 1 && i * KS % EVERY == 0;
    const u32 at = ring + p.stage * STAGE_BYTES + KS * X_BYTES, slot = ring + STAGES * STAGE_BYTES + p.slot * SLOT_BYTES;
    const u32 bar = full + 8 * p.stage;
    const int row = tile.row / 16;
    barrier_expect(bar, KS * (X_BYTES + TILES * CODE_BYTES) + (scales ? TILES * SCALE_BYTES : 0));
    const int first = i * KS, inside = (first / SPAN * Q_RECORD_BYTES + first % SPAN * Q_STEP_BYTES) / 8;
    tma_load(at, map_w, bar, SPAN > 1 ? inside : 0, row, SPAN > 1 ? 0 : first, 0);
    if (scales) tma_load(slot, map_s, bar, (i * KS / SPAN * Q_RECORD_BYTES + Q_FLOATS) / 8, row, 0, 0);
  }
  __device__ __forceinline__ void bring_x(const Block& tile, int i, const Place& p) const {
    const u32 at = ring + p.stage * STAGE_BYTES, bar = full + 8 * p.stage, share = CM > 1 ? cluster_rank() * (BX / CM) : 0;
#pragma unroll
    for (int s = 0; s < KS; s += WHOLE ? KS : 1) {
      const int step = i * KS + s, k = WHOLE ? 0 : 64 * step, whole = WHOLE ? step : 0;
      if (CM > 1) tma_multicast(at + s * X_BYTES + share * 128, map_x, bar, k, tile.col + share, whole, (1 << CM) - 1, 0);
      else tma_load(at + s * X_BYTES, map_x, bar, k, tile.col, whole, 0);
    }
  }
};
