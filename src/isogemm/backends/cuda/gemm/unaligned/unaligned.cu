// D[r, c] = sum over k of W[r, k] * X[c, k], W read once, as it lies: its lines begin at any multiple of 2 bytes.
//
// Operands   W of bf16 or fp16: lines of K, `step` elements apart, or with ACROSS lines of rows. X of the same type through a
//            three-dimensional map (row, k, item), K-major or, with Y_MN, MN-major. D lies with its rows contiguous (COLUMNS),
//            or its columns.
// Order      every element walks K in ascending blocks of 16, one wgmma each, in one float32 accumulator. Behind the end of
//            K both operands are zeros: X by its map, W by masks, as what lies there is somebody else's.
// Lines      of each line come the words of 16 bytes that hold a stage of it, and no others. A stage is a multiple of 8
//            elements, so a line begins at the same byte of such a word in each; consumers read words of 4 bytes from there into
//            the registers of an instruction's first operand, and where lines begin at odd elements (ODD) shift two of them
//            into one.
// Roles      WARPGROUPS consumers, of `rows` rows of W each, up to 64, and BN of X. Seven warps bring W, an eighth X: a warp
//            issues a bulk copy in some 75 cycles. With COPIED, X is what the kernel before has written, and W is older: it is
//            not waited for.
// Short      of TILE_ROWS 32 a warp has 8 rows and no second half, so that it has half as much to read.
// Clusters   CLUSTER blocks take neighbouring rows of W; each loads a part of X for all of them. A buffer is free once the
//            consumers of every block have left it.

constexpr int WARPGROUPS = TILE_ROWS < 64 ? 1 : TILE_ROWS / 64, BRINGERS = 7, THREADS = 128 * WARPGROUPS + 32 * (BRINGERS + 1);
#define WARPS_APART  // of few rows of W a warp has 8

#include "include/hopper_operand.cu"
#include "include/hopper_epilogue.cu"

constexpr int DEPTH = 64 * KS, MOST_STAGES = 32;
constexpr bool SHORT_LINES = ACROSS && TILE_ROWS < 128;  // threads copy them: a bulk copy takes the copy engine some 20 cycles
constexpr int WARP_ROWS = TILE_ROWS < 64 ? 8 : 16, HALVES = WARP_ROWS / 8;
constexpr int PITCH = 2 * (ACROSS ? TILE_ROWS : DEPTH) + 16;  // bytes from line to line: 8 of them share no bank
constexpr int Y_BLOCK = (Y_MN ? (BN + 63) / 64 * 64 : BN) * 128, Y_BYTES = KS * Y_BLOCK;

struct Grid {
  int tiles_w, tiles_x, items, rows;
  __device__ __forceinline__ int count() const { return tiles_w * tiles_x * items; }
  // Tiles that share rows of W are neighbours.
  __device__ __forceinline__ Tile operator[](int t) const {
    const int w = t / tiles_x, item = w / tiles_w, rank = CLUSTER > 1 ? cluster_rank() : 0;
    return {((w - item * tiles_w) * CLUSTER + rank) * rows, (t - w * tiles_x) * BN, item};
  }
};

DEVICE void copy_word(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// This thread's arrival, once its copies so far are complete.
DEVICE void arrive_when_copied(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Into `w`, which stays as it is without `really`: a branch in the walk costs more than loads that nothing waits for.
DEVICE void load_word(u32& w, u32 a, u32 really) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.shared.u32 %0, [%1];\n}" : "+r"(w) : "r"(a), "r"(really) : "memory");
}
DEVICE u32 half_at(u32 a) { u16 h; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(a) : "memory"); return h; }

// What a lane reads of a stage. Of the rows of its warp it has rows lane / 4 and 8 more, of 16 of K the pairs 2 * (lane % 4)
// and 8 more. ACROSS: places of two lines, whose 8 neighbours begin at the same bytes; else of two rows.
struct Reader {
  u32 at[2], pick[2];
  u32 low[4][2][HALVES], high[4][2][HALVES];  // of four instructions, 8 of K, and 8 rows
  __device__ __forceinline__ void load(u32 from, u32 really) {
#pragma unroll
    for (int i = 0; i < 8 * HALVES; ++i) {
      const int x = i / (2 * HALVES), k = i / HALVES % 2, r = i % HALVES, first = 16 * x + 8 * k;
      if (ACROSS) {
        const u32 off = from + first * PITCH + 16 * r;
        low[x][k][r] = half_at(at[0] + off), high[x][k][r] = half_at(at[1] + off);
      } else {
        const u32 a = at[r] + from + 2 * first;
        load_word(low[x][k][r], a, really);
        if (ODD) load_word(high[x][k][r], a + 4, really);
      }
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * HALVES; ++i) low[i / (2 * HALVES)][i / HALVES % 2][i % HALVES] = high[i / (2 * HALVES)][i / HALVES % 2][i % HALVES] = 0;
  }
  // First operands of those instructions; of 64 of K there are `left`.
  __device__ __forceinline__ void shift(u32 (&w)[4][4], bool whole, int left, u32 lane) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int x = i / 4, k = i / 2 % 2, r = i % 2, first = 16 * x + 8 * k + 2 * (lane & 3);
      u32 v = 0;
      if (r < HALVES) {
        v = low[x][k][r % HALVES];
        if (ACROSS || ODD) v = __byte_perm(v, high[x][k][r % HALVES], ACROSS ? 0x5410 : pick[r]);
        if (!whole) v = first + 1 < left ? v : first < left ? v & 0xffff : 0;
      }
      w[x][i % 4] = v;
    }
  }
};

// A warp has left a buffer: tell every block that writes into it.
DEVICE void release(u32 empty, u32 lane) {
  if (CLUSTER == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else if (lane < CLUSTER) {
    barrier_arrive_at(empty, lane);
  }
}

// Lines of W into the ring, by one of seven warps.
struct Bringer {
  const u8* w;
  i64 step, each;  // bytes
  int k;
  // Bytes of the words of 16 that hold a line's `bytes` from `from` on.
  static __device__ __forceinline__ u32 covering(const u8* from, u32 bytes) { return (((u32)(u64)from & 15) + bytes + 15) & ~15u; }
  __device__ __forceinline__ void bring(const Tile& tile, int rows, int from, u32 at, u32 bar, u32 first, u32 lane) const {
    const int lines = ACROSS && rows > 0 ? min(DEPTH, k - from) : rows;
    const u8* base = w + tile.item * each + (ACROSS ? 2 * (i64)tile.row + from * step : tile.row * step + 2 * (i64)from);
    const u32 bytes = 2 * (ACROSS ? rows : min(DEPTH, k - from));
    if (SHORT_LINES) {
      constexpr int WORDS = PITCH / 16;
#pragma unroll 4
      for (int i = 32 * first + lane; i < lines * WORDS; i += 32 * BRINGERS) {
        const int line = i / WORDS, word = i - line * WORDS;
        const u8* here = base + line * step;
        if (16 * word < covering(here, bytes)) copy_word(at + 16 * i, (const u8*)((u64)here & ~15ull) + 16 * word);
      }
      arrive_when_copied(bar);
      return;
    }
    constexpr int EACH = ((ACROSS ? DEPTH : TILE_ROWS) + 32 * BRINGERS - 1) / (32 * BRINGERS);
    u32 sizes[EACH], total = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int line = BRINGERS * (32 * i + lane) + first;
      total += sizes[i] = line < lines ? covering(base + line * step, bytes) : 0;
    }
    total = __reduce_add_sync(~0u, total);
    if (lane == 0) barrier_expect(bar, total);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int line = BRINGERS * (32 * i + lane) + first;
      if (sizes[i]) bulk_load(at + line * PITCH, (const u8*)((u64)(base + line * step) & ~15ull), sizes[i], bar);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
unaligned(const __grid_constant__ Map map_x, const u8* w, u8* out, const void* c, const void* bias, i64 step, i64 each, i64 out_ld,
          i64 out_batch, i64 c_row, i64 c_col, i64 c_batch, i64 bias_step, int size, int cols, int k, int rows, int stages,
          int stage_bytes, int tiles_w, int tiles_x, int items, int x_item, float alpha, float beta) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[2 * MOST_STAGES];
  const u32 ring = (shared(memory) + 1023) & ~1023u, full = shared(barriers), empty = full + 8 * MOST_STAGES;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const Grid grid{tiles_w, tiles_x, items, rows * WARPGROUPS};
  const int iters = (k + DEPTH - 1) / DEPTH;

  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) barrier_init(full + 8 * s, BRINGERS * (SHORT_LINES ? 32 : 1) + 1), barrier_init(empty + 8 * s, 4 * WARPGROUPS * CLUSTER);
    barrier_init_fence();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  const int start = CLUSTER > 1 ? cluster_id() : blockIdx.x, next = CLUSTER > 1 ? cluster_count() : gridDim.x;
  if (warp >= 4 * WARPGROUPS) {
    fewer_registers<56>();
    const u32 first = warp - 4 * WARPGROUPS;
    const Bringer of_w{w, 2 * step, 2 * each, k};
    if (!COPIED || first == BRINGERS) wait_for_predecessor();
    u32 stage = 0, parity = 1;
    for (int t = start; t < grid.count(); t += next) {
      const Tile tile = grid[t];
      const int here = max(0, min(rows * WARPGROUPS, size - tile.row));  // a cluster's last blocks may have none
      for (int i = 0; i < iters; ++i) {
        const u32 bar = full + 8 * stage, at = ring + stage * stage_bytes;
        barrier_wait(empty + 8 * stage, parity);
        if (first < BRINGERS) {
          of_w.bring(tile, here, i * DEPTH, at + Y_BYTES, bar, first, lane);
        } else if (elected()) {
          barrier_expect(bar, Y_BYTES);
          load_operand<Y_MN, BN, CLUSTER>(&map_x, at, bar, tile.col, i * DEPTH, tile.item * x_item, CLUSTER > 1 ? cluster_rank() : 0,
                                          (1 << CLUSTER) - 1, 0);
        }
        __syncwarp();
        if (++stage == stages) stage = 0, parity ^= 1;
      }
    }
    release_successor();
    if (CLUSTER > 1) drain(empty, stages, stage, parity);
    return;
  }

  more_registers<WARPGROUPS == 1 ? 232 : 200>();
  wait_for_predecessor();
  const u32 group = warp / 4, q = lane & 3;
  const u64 first_y = descriptor<Y_MN>(ring);
  u32 stage = 0, parity = 0;
  float acc[BN / 2];
  for (int t = start; t < grid.count(); t += next) {
    const Tile tile = grid[t];
    const int row0 = tile.row + group * rows;
    // Rows of W are shared by all four warps where there are few: a warp has 8 then, and no second half.
    const int first_row = row0 - (16 - WARP_ROWS) * (warp & 3), last = min(size, min(row0 + rows, row0 + WARP_ROWS * ((int)(warp & 3) + 1)));
    Epilogue e{out, c, bias, out_ld, out_batch, c_row, c_col, c_batch, bias_step, last, cols, alpha, beta};
    e.pieces = memory + (ring - shared(memory)) + stages * stage_bytes;
    const u8* base = w + 2 * (tile.item * each);
    Reader reader;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = WARP_ROWS * (warp & 3) + (lane >> 2) + 8 * i;  // nobody's rows read what there is
      if (ACROSS) {
        const u32 begins = (u32)(u64)(base + 2 * ((i64)tile.row + (2 * q + i) * step)) & 15;
        reader.at[i] = ring + Y_BYTES + (2 * q + i) * PITCH + begins + 2 * (group * rows + row - 8 * i);
      } else {
        const int mine = group * rows + min(row, rows - 1);
        const u32 begins = (u32)(u64)(base + 2 * ((i64)tile.row + mine) * step) & 15;
        reader.at[i] = ring + Y_BYTES + mine * PITCH + (begins & ~3) + 4 * q;
        reader.pick[i] = begins & 2 ? 0x5432 : 0x3210;
      }
    }
    const u32 really = WARP_ROWS * (warp & 3) < rows;
    int scale = ACCUMULATE;
#if ACCUMULATE
#pragma unroll
    for (int i = 0; i < BN / 2; i += 2) {
      const float2 start = load_c(e, i, first_row + 16 * (warp & 3) + (lane >> 2), tile.col + 2 * q, tile.item);
      acc[i] = start.x, acc[i + 1] = start.y;
    }
    pin(acc);
#endif
    u32 a[2][4][4], previous = 0;
    reader.clear();
    const auto load = [&](int j) {
      if (j == 0) barrier_wait(full + 8 * stage, parity);
      reader.load(stage * stage_bytes + (ACROSS ? 64 * j * PITCH : 128 * j), really);
    };
    load(0);
    const auto walk = [&](bool whole, int i) __attribute__((always_inline)) {
      const u32 here = stage, at = stage * stage_bytes;
#pragma unroll
      for (int j = 0; j < KS; ++j) {
        const int left = k - i * DEPTH - 64 * j;
        reader.shift(a[j % 2], whole, left, lane);
        // What comes next is on its way while instructions are issued, and those before have the other registers.
        if (j + 1 == KS && ++stage == stages) stage = 0, parity ^= 1;
        if (j + 1 < KS || i + 1 < iters) load((j + 1) % KS);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          mma(acc, a[j % 2][x], further(first_y, (at + j * Y_BLOCK + x * (Y_MN ? 2048 : 32)) >> 4), scale);
          scale = 1;
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (j == 0 && i > 0) release(empty + 8 * previous, lane);
      }
      previous = here;
    };
#pragma unroll 1
    for (int i = 0; i < k / DEPTH; ++i) walk(true, i);
    if (k % DEPTH) walk(false, iters - 1);
    wgmma_wait<0>();
    release(empty + 8 * previous, lane);
    if (row0 < size) store_block(e, acc, first_row, tile.col, tile.item, threadIdx.x & 127);
  }
}
