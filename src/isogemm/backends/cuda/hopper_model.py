"""Which configurations of the Hopper kernels are worth timing: a model of an H200's limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from .hopper_config import SHARED, Config, geometry, serves
from .product import ITEMSIZE, Product

__all__ = ["ranked", "resident"]


def resident(c: Config, multiprocessors: int) -> int:
    """Clusters that run at once: multiprocessors come in groups of 16 or 18, and a cluster stays inside of one."""
    if c.cluster <= 2:
        return multiprocessors * c.occupancy // c.cluster
    return multiprocessors // 16 * (16 // c.cluster) * c.occupancy


@functools.lru_cache(maxsize=4096)
def ranked(p: Product) -> tuple[Config, ...]:
    """Legal configurations, the fastest first."""
    if not serves(p):
        return ()
    legal = [c for c in _candidates(p) if serves(p, c)]
    return tuple(sorted(legal, key=lambda c: _cost(p, c)))


def _candidates(p: Product) -> Iterator[Config]:
    for swapped in (False, True):
        for rows, pingpong in ((64, False), (128, False), (256, False), (64, True), (128, True)):
            for cols in (*range(8, 64, 8), *range(64, 257, 16)):
                for cm, cn in ((1, 1), (2, 1), (1, 2)):
                    config = _filled(p, Config(swapped, rows, cols, 64, 2, cm, cn, pingpong))
                    if config is not None:
                        yield config


def _filled(p: Product, c: Config) -> Config | None:
    """With K of a stage and stages such that a ring of reasonable stages fills shared memory."""
    g = geometry(p, c)
    if g is None:
        return None
    leaf = p.contract.order.kind == "leaf"
    lines = g.x_rows + g.y_rows
    depth = 64 if lines > 96 else 128 if lines > 48 else 256
    if p.k <= 64:
        depth = 64
    c = replace(c, depth=depth)
    stages = (SHARED - replace(g, config=replace(c, stages=0)).shared(leaf)) // (depth * 2 * lines)
    return replace(c, stages=min(stages, max(2, 2 * -(-p.k // depth)), 16)) if stages >= 2 else None


def _cost(p: Product, c: Config) -> float:
    """Cycles by a model of an H200: products, what a multiprocessor and L2 deliver, the memory, the epilogue."""
    g = geometry(p, c)
    assert g is not None
    tiles = math.prod(g.tiles()) * p.batch
    slots = resident(c, 132)
    waves = -(-tiles // slots)
    busy = min(tiles, slots) * c.cluster
    block = max(c.cols / 2, (2048 + 32 * c.cols) / 128) * (c.rows // 64) * 4
    ingest = (g.x_rows + g.y_rows) * 128 / 60
    l2 = (g.x_rows / c.cn + g.y_rows / c.cm) * 128 * busy / 3000
    walk = -(-p.k // 64) * max(block, ingest, l2) + 1500
    store = c.rows * c.cols * ITEMSIZE[p.dtype_out] * busy / 2200 + 800
    memory = 2.0 * (p.m * p.k + p.n * p.k) * p.batch / 2400
    cycles = waves * walk + store * (1 if c.pingpong else waves)
    return max(cycles, memory * 132 / min(132, busy)) + 0.3 * min(cycles, memory)
