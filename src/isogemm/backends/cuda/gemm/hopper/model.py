"""Which configurations of the Hopper kernels are worth timing, and what each is expected to take.

What was seen beyond the model (H200, bf16, November 2026): weights that leave L2 first (``e``) give 1 to 5 % where they
stream for more than 15 us; clusters of four lose half, because fewer of them fit than multiprocessors would allow.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator

from .....base.dtypes import ITEMSIZE
from .....problem.product import Product
from ..model import H200, Gpu, Tiling, microseconds
from .config import SHARED, HopperConfig, fits, geometry, leaf_of, levels_of, serves


def resident(c: HopperConfig, multiprocessors: int) -> int:
    """Clusters that run at once: multiprocessors come in groups of 16 or 18, and a cluster stays inside of one."""
    if c.cluster <= 2:
        return multiprocessors * c.occupancy // c.cluster
    return multiprocessors // 16 * (16 // c.cluster) * c.occupancy


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


def _candidates(p: Product) -> Iterator[HopperConfig]:
    """Legal configurations whose tiles are not larger than the product for nothing."""
    for swapped in (False, True):
        x, y = (p.n, p.m) if swapped else (p.m, p.n)
        for rows, pingpong in ((64, False), (128, False), (192, False), (256, False), (64, True), (128, True)):
            if rows - 64 >= x:
                continue
            for cols in (*range(8, 64, 8), *range(64, 257, 16)):
                if cols - 16 >= y:
                    break
                # Smaller tiles lose more by waiting for one another than they gain (0.7 to 0.9 of the speed).
                clusters = ((1, 1), (2, 1), (1, 2)) if rows * cols >= 128 * 128 else ((1, 1),)
                for cm, cn in clusters:
                    for config in _filled(p, HopperConfig(swapped, rows, cols, 64, 2, cm, cn, pingpong)):
                        if fits(p, config):
                            yield config


def _filled(p: Product, c: HopperConfig) -> Iterator[HopperConfig]:
    """With K of a stage, stages that fill shared memory, and weights that leave L2 first where they are read once."""
    g = geometry(p, c)
    if g is None:
        return
    lines = g.x_rows + g.y_rows
    room = SHARED - g.beside_the_ring(leaf_of(p) > 0)
    once = g.tiles()[1 if c.swapped else 0] == 1 and p.batch == 1
    for depth in (64, 128, 256):
        stages = min(room // (depth * 2 * lines), max(2, 2 * -(-p.k // depth)), 24)
        deep = depth > 64 and depth < 2 * p.k and depth * lines <= 128 * 136
        if stages >= (4 if deep else 2) and (deep or depth == 64):
            yield HopperConfig(c.swapped, c.rows, c.cols, depth, stages, c.cm, c.cn, c.pingpong, evict=once)


# Cycles of a stage, how many times as many where the blocks of a cluster share it, bytes a cycle that a tile stores,
# and cycles before it does.
STAGE, CLUSTERED, STORE, EPILOGUE = 184.0, 6.05, 5.83, 1428.0
START, COLUMN = 17.1, 0.606  # cycles of an instruction, and of each of its columns
L2_EACH = 34.0  # bytes a cycle, for each multiprocessor
BIASED = 0.07  # cycles of a value whose bias is another in every column


def expected(p: Product, c: HopperConfig, gpu: Gpu) -> float:
    """Microseconds by the model; see `isogemm.backends.cuda.gemm.model`."""
    g = geometry(p, c)
    assert g is not None
    tiles = math.prod(g.tiles()) * p.batch
    waves = -(-tiles // resident(c, gpu.multiprocessors))
    biased = p.dtype_bias is not None and not c.swapped
    carried = max(0, p.contract.order.size - 2) if levels_of(p) else 0  # sums of a tree that wait, and are met
    cut = Tiling(
        tiles=tiles * c.cluster,
        waves=waves,
        lines=g.x_rows / c.cn + g.y_rows / c.cm,
        work=(START + COLUMN * c.cols) * (c.rows // 64) * 4,
        stage=STAGE * (CLUSTERED if c.cluster > 1 else 1) * 64 / c.depth,
        store=c.rows * c.cols * (ITEMSIZE[p.dtype_out] / STORE + BIASED * biased + 4 * carried / L2_EACH) + EPILOGUE,
        stores=1 if c.pingpong else waves,
    )
    # Tiles shared by all consumers where one wave is all there is, weights not swapped, pairs of blocks.
    ties = 0.105 * (c.pingpong and waves == 1) + 0.047 * c.swapped + 0.001 * (c.cluster == 1 and c.rows > 64)
    return microseconds(p, cut, gpu) * (1 + ties)
