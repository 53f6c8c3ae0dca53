"""Which configurations of the Hopper kernels are worth timing: a model of an H200's limits.

Measured on an H200 (driver 580, CUDA 13.0, November 2026), bf16, CUDA graphs, weights rotated past L2; speed of the
best configuration against torch's product in the same run:

==============================  ==============================================================================
M <= 16                         1.04 to 1.34: one wave of 64 x 24 to 64 x 224, weights leaving L2 first (``e``),
                                which gives 1.01 to 1.05 where they stream for more than 15 us
M = 64                          1.04 to 1.17: 64 x 24 to 64 x 224 without clusters
M = 4096, (N, K) (4096, 14336)  0.997 (629 us, 764 TFLOP/s): 128 x 256; ``leaf4096`` 0.964
M = 4096, (N, K) (4096, 4096)   1.03: 128 x 128 in turns; 1.006: 128 x 256
gradient 14336 x 4096 x 8192    0.986 chain, 0.952 ``leaf4096``, both operands transposed, from a float32 C
32 x (512 x 128 x 512)          1.43: 128 x 128 in pairs; 32 x (512 x 512 x 128) 1.12 in turns
32 x (4096 x 4096 x 128)        0.85, bound by what the epilogue writes; 32 x (4096 x 128 x 4096) 1.02
==============================  ==============================================================================

Clusters of two cost tiles under 128 x 128 10 to 50% and are worth -1 to +2% above; clusters of four lose half, because
fewer of them fit than multiprocessors would allow.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .....base.dtypes import ITEMSIZE
from .....problem.product import Product
from .config import SHARED, HopperConfig, geometry, serves

__all__ = ["ranked", "resident"]


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
    legal = [c for c in _candidates(p) if serves(p, c)]
    best: list[HopperConfig] = []
    seen: Counter[tuple[bool, int, int]] = Counter()
    for c in sorted(legal, key=lambda c: _cost(p, c)):
        tile = c.swapped, c.rows, c.cols
        seen[tile] += 1
        if seen[tile] <= 2:
            best.append(c)
    return tuple(best)


def _candidates(p: Product) -> Iterator[HopperConfig]:
    for swapped in (False, True):
        for rows, pingpong in ((64, False), (128, False), (192, False), (256, False), (64, True), (128, True)):
            for cols in (*range(8, 64, 8), *range(64, 257, 16)):
                # Smaller tiles lose more by waiting for one another than they gain (0.7 to 0.9 of the speed).
                clusters = ((1, 1), (2, 1), (1, 2)) if rows * cols >= 128 * 128 else ((1, 1),)
                for cm, cn in clusters:
                    config = _filled(p, HopperConfig(swapped, rows, cols, 64, 2, cm, cn, pingpong))
                    if config is not None:
                        yield config


def _filled(p: Product, c: HopperConfig) -> HopperConfig | None:
    """With K of a stage, stages that fill shared memory, and weights that leave L2 first where they are read once."""
    g = geometry(p, c)
    if g is None:
        return None
    leaf = p.contract.order.kind == "leaf"
    lines = g.x_rows + g.y_rows
    depth = 64 if lines > 96 or p.k <= 64 else 128 if lines > 16 else 256
    once = g.tiles()[1 if c.swapped else 0] == 1 and p.batch == 1
    c = replace(c, depth=depth, evict=once)
    stages = (SHARED - replace(g, config=replace(c, stages=0)).shared(leaf)) // (depth * 2 * lines)
    return replace(c, stages=min(stages, max(2, 2 * -(-p.k // depth)), 24)) if stages >= 2 else None


# Cycles of an H200 at about 1.9 GHz. Fitted to 500 timings of M = 1..4096 over the linear layers of four models:
# what a multiprocessor takes in is the limit of small tiles (62 bytes a cycle), not what L2 gives out (over 11 TB/s).
INGEST, MEMORY, STAGE, START, STORE = 62.0, 2160.0, 220.0, 1500.0, 24.0


def _cost(p: Product, c: HopperConfig) -> float:
    """Cycles by a model of an H200: products, what a multiprocessor takes in, the memory, the epilogue."""
    g = geometry(p, c)
    assert g is not None
    tiles = math.prod(g.tiles()) * p.batch
    slots = resident(c, 132)
    waves = -(-tiles // slots)
    busy = min(tiles, slots) * c.cluster
    # An instruction takes n / 2 cycles, or what reading its operands from shared memory takes.
    block = max(c.cols / 2, 16 + c.cols / 4) * (c.rows // 64) * 4
    step = max(block, (g.x_rows + g.y_rows) * 128 / INGEST, STAGE * 64 / c.depth)
    store = c.rows * c.cols * ITEMSIZE[p.dtype_out] / STORE + 800
    cycles = waves * -(-p.k // 64) * step + START + store * (1 if c.pingpong else waves)
    operands = 2.0 * (p.m * p.k + p.n * p.k) * p.batch
    memory = operands / min(MEMORY, busy * INGEST) + p.m * p.n * p.batch * ITEMSIZE[p.dtype_out] / MEMORY
    # Among equals: tiles shared by all consumers where one wave is all there is, weights not swapped, pairs of blocks.
    ties = 0.05 * (c.pingpong and waves == 1) + 0.01 * c.swapped + 0.001 * (c.cluster == 1 and c.rows > 64)
    return (max(cycles, memory) + 0.3 * min(cycles, memory)) * (1 + ties)
