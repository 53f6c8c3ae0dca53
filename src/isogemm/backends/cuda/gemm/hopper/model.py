"""Which configurations of the Hopper kernels are worth timing, and what each is expected to take.

What was seen beyond the model (H200, bf16, November 2026): weights that leave L2 first (``e``) give 1 to 5 % where they
stream for more than 15 us. An H200 holds 66 clusters of two, 30 of four and 15 of eight: one more is a second wave.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator

from .....base.dtypes import ITEMSIZE
from .....problem.product import Product
from ..model import H200, Gpu, Tiling, microseconds, together
from .config import SHARED, HopperConfig, fits, geometry, levels_of, serves


def resident(c: HopperConfig, multiprocessors: int) -> int:
    """Clusters that run at once: multiprocessors come in groups of at most 18, and a cluster stays inside of one."""
    room = multiprocessors if c.cluster <= 2 else multiprocessors // 11 * 10
    return room * c.occupancy // c.cluster


@functools.lru_cache(maxsize=4096)
def ranked(p: Product) -> tuple[HopperConfig, ...]:
    """Legal configurations, the fastest first; of each tile the best two."""
    if not serves(p):
        return ()
    best: list[HopperConfig] = []
    seen: Counter[tuple[bool, int, int]] = Counter()
    for c in sorted(_candidates(p), key=lambda c: expected(p, c, H200)):
        tile = c.swapped, c.rows, c.cols
        seen[tile] += 1
        if seen[tile] <= 2:
            best.append(c)
    return tuple(best)


TILES = ((64, False), (128, False), (192, False), (256, False), (64, True), (128, True))
ALONE = ((1, 1),)
PAIRS = (*ALONE, (2, 1), (1, 2))
GROUPS = (*PAIRS, (2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (8, 1), (1, 8))
# Where a chain waits for its operands: a K, tiles (no more than an H200 has multiprocessors) and columns of a tile.
LONG, FEW, NARROW = 4096, 132, 80


def _candidates(p: Product) -> Iterator[HopperConfig]:
    """Legal configurations whose tiles are not larger than the product for nothing."""
    for swapped in (False, True):
        x, y = (p.n, p.m) if swapped else (p.m, p.n)
        for rows, pingpong in (*(((16, False), (32, False)) if p.k >= LONG else ()), *TILES):
            if rows - 64 >= x or (rows < 64 and rows >= x):
                continue
            for cols in (*range(8, 64, 8), *range(64, 257, 16)):
                if cols - 16 >= y:
                    break
                few = p.k >= LONG and -(-x // rows) * -(-y // cols) * p.batch <= FEW
                if rows < 64 and not few:
                    continue
                # Other tiles lose more by waiting for one another than they gain (0.7 to 0.9 of the speed).
                waiting = few and rows <= 64 and cols <= NARROW and not pingpong
                for cm, cn in GROUPS if waiting else PAIRS if rows * cols >= 128 * 128 else ALONE:
                    for config in _filled(p, HopperConfig(swapped, rows, cols, 64, 2, cm, cn, pingpong)):
                        if fits(p, config):
                            yield config


def _filled(p: Product, c: HopperConfig) -> Iterator[HopperConfig]:
    """With K of a stage, stages that fill shared memory, and weights that leave L2 first where they are read once.

    A tree has configurations with fewer stages, too, beside which sums can wait.
    """
    g, waiting = geometry(p, c), c.cluster > 1 and c.rows <= 64
    if g is None or (waiting and (g.x.across or g.y.across)):
        return
    lines = g.x_rows + g.y_rows
    rooms = [SHARED - g.beside_the_ring(p) - i * c.sums for i in range(levels_of(p) + 1)]
    once = g.tiles()[1 if c.swapped else 0] == 1 and p.batch == 1
    for room, depth in itertools.product(rooms, (128, 256) if waiting else (64, 128, 256)):
        stages = min(room // (depth * 2 * lines), max(2, 2 * -(-p.k // depth)), 24)
        deep = depth > 64 and depth < 2 * p.k and depth * lines <= 128 * 136
        if stages >= (4 if deep else 2) and (deep or depth == 64):
            yield HopperConfig(c.swapped, c.rows, c.cols, depth, stages, c.cm, c.cn, c.pingpong, evict=once)


# Cycles of a stage, how many times as many where the blocks of a cluster share it (of large tiles, of others), bytes a
# cycle that a tile stores, and cycles before it does.
STAGE, CLUSTERED, SHARED_STAGE, STORE, EPILOGUE = 176.0, 5.24, 1.71, 5.83, 1428.0
START, COLUMN = 16.1, 0.558  # cycles of an instruction, and of each of its columns
# Cycles from a buffer's release until it is full again, and how many times as many where a cluster fills it.
REFILL, SHARED_REFILL = 1490.0, 1.73
CARRY = 14.0  # bytes a cycle of sums that wait in memory: put there, and taken back
# Of the model's for a line; more of the larger operand's, which comes from memory, where several tiles read it.
LINE, REREAD = 0.863, 0.0906
BIASED = 0.07  # cycles of a value whose bias is another in every column


def expected(p: Product, c: HopperConfig, gpu: Gpu) -> float:
    """Microseconds by the model; see `isogemm.backends.cuda.gemm.model`."""
    g = geometry(p, c)
    assert g is not None
    tiles = math.prod(g.tiles()) * p.batch
    waves = -(-tiles // resident(c, gpu.multiprocessors))
    biased = p.dtype_bias is not None and not c.swapped
    x, y = g.x_rows / c.cn, g.y_rows / c.cm
    larger, readers = (x, g.tiles()[1]) if g.x.size >= g.y.size else (y, g.tiles()[0])
    carried = 2 * (2 ** (levels_of(p) - g.inside(p)) - 1)  # sums of a tree that wait in memory, and are met
    cut = Tiling(
        tiles=tiles * c.cluster,
        waves=waves,
        lines=LINE * (x + y) + REREAD * larger * (readers > 1),
        work=(START + COLUMN * c.cols) * -(-c.rows // 64) * 4,
        stage=_stage(c) * 64 / c.depth,
        store=c.rows * c.cols * (ITEMSIZE[p.dtype_out] / STORE + BIASED * biased + 4 * carried / CARRY) + EPILOGUE,
        stores=1 if c.pingpong else waves,
    )
    # Tiles shared by all consumers where one wave is all there is, weights not swapped, pairs of blocks.
    # A tree in one walk takes two thirds of what leaves side by side do where the rest of the model says as much.
    ties = 0.105 * (c.pingpong and waves == 1) + 0.047 * c.swapped + 0.001 * (c.cluster == 1 and c.rows > 64)
    ties -= 0.33 * (p.contract.order.kind == "tree")
    return microseconds(p, cut, gpu) * (1 + ties)


def _stage(c: HopperConfig) -> float:
    """Cycles that a stage takes at least: to hand it over, and to fill it again while the others are used."""
    if c.cluster == 1:
        return together(STAGE, REFILL / (c.stages - 1))
    handed = CLUSTERED if c.rows * c.cols >= 128 * 128 else SHARED_STAGE
    return together(STAGE * handed, REFILL * SHARED_REFILL / (c.stages - 1))
