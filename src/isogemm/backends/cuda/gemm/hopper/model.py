"""Which configurations of the Hopper kernels are worth timing, and what each is expected to take.

What was seen beyond the model (H200, bf16, November 2026): weights that leave L2 first (``e``) give 1 to 5 % where they
stream for more than 15 us. An H200 holds 66 clusters of two, 30 of four and 15 of eight: one more is a second wave.
What the constants are fitted to is in docs/design/0011-cost-model.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .....base.dtypes import ITEMSIZE
from .....problem.product import Product
from ..model import H200, Gpu, Tiling, microseconds, together
from .config import (
    SHARED,
    Geometry,
    HopperConfig,
    HopperSide,
    fits,
    geometry,
    group_of,
    late,
    leaf_of,
    levels_of,
    resident,
    serves,
)


@functools.lru_cache(maxsize=4096)
def ranked(p: Product) -> tuple[HopperConfig, ...]:
    """Legal configurations, the fastest first; of each tile the best two."""
    if not serves(p):
        return ()
    times = {c: expected(p, c, H200) for c in _alone(p)}
    for more in (_between, _clusters):
        near = sorted(times, key=times.__getitem__)[:NEAR]
        found = dict.fromkeys(c for one in near for c in more(p, one))
        times |= {c: expected(p, c, H200) for c in found if c not in times}
    best: list[HopperConfig] = []
    seen: Counter[tuple[bool, int, int]] = Counter()
    for c in sorted(times, key=times.__getitem__):
        tile = c.swapped, c.rows, c.cols
        seen[tile] += 1
        if seen[tile] <= 2:
            best.append(c)
    return tuple(best)


TILES = ((64, False), (128, False), (192, False), (256, False), (64, True), (128, True))
SHORT = ((16, False), (32, False))
PAIRS = ((2, 1), (1, 2))
CLUSTERS = (*PAIRS, (4, 1), (1, 4), (8, 1), (1, 8), (2, 2), (4, 2), (2, 4))
COARSE = 16  # columns from one tile to the next, above 64
FEW = 132  # tiles: no more than an H200 has multiprocessors
RING = 152 * 1024  # bytes of a ring's stages in a crowded launch
NEAR = 32  # configurations, the fastest, that are offered with columns between those and in clusters too


def _alone(p: Product) -> Iterator[HopperConfig]:
    """Legal configurations of single blocks whose tiles are not larger than the product for nothing."""
    for swapped in (False, True):
        x, y = (p.n, p.m) if swapped else (p.m, p.n)
        for rows, pingpong in (*SHORT, *TILES):
            if rows - 64 >= x or (rows < 64 and rows >= x):
                continue
            for cols in (*range(8, 64, 8), *range(64, 257, COARSE)):
                if cols - COARSE >= y:
                    break
                few = _few(p, x, y, rows, cols)
                if (few and not pingpong) or (not few and rows >= 64):
                    yield from _filled(p, HopperConfig(swapped, rows, cols, 64, 2, pingpong=pingpong))


def _between(p: Product, c: HopperConfig) -> Iterator[HopperConfig]:
    """A configuration's neighbours by 8 columns: what fits a wave, or the product, is often one of them."""
    x, y = (p.n, p.m) if c.swapped else (p.m, p.n)
    for cols in (c.cols - 8, c.cols + 8) if min(c.rows, c.cols) >= 64 else ():
        if cols - 8 < y and cols <= 256 and not (c.pingpong and _few(p, x, y, c.rows, cols)):
            yield from _filled(p, replace(c, cols=cols), (c.depth,))


def _clusters(p: Product, c: HopperConfig) -> Iterator[HopperConfig]:
    """Clusters of a configuration's blocks: of a few, or pairs of large ones.

    None where there are too few rows to be worth sharing, and the next launch is to wait for a single block's.
    """
    g = geometry(p, c)
    assert g is not None
    tiles = math.prod(g.tiles()) * p.batch
    if min(p.m, p.n) <= 16 and _crowded(g, tiles, H200):
        return
    for cm, cn in CLUSTERS if tiles <= FEW else PAIRS if c.rows >= 128 else ():
        yield from _filled(p, replace(c, cm=cm, cn=cn), (c.depth,))


def _few(p: Product, x: int, y: int, rows: int, cols: int) -> bool:
    """Whether there are no more tiles than one wave: then short ones may do, and none has another's to hide behind."""
    return -(-x // rows) * -(-y // cols) * p.batch <= FEW


def _filled(p: Product, c: HopperConfig, depths: Sequence[int] = (64, 128, 256)) -> Iterator[HopperConfig]:
    """Configurations with a stage's K, stages that fill shared memory, and weights read once that leave L2 first.

    In a crowded launch they fill no more than RING of it. A tree has configurations with fewer stages, too, beside
    which sums can wait.
    """
    least = replace(c, depth=64, stages=2)
    if not fits(p, least):  # so nothing does that is deeper; and what has room for its stages fits
        return
    g = geometry(p, least)
    assert g is not None
    lines, leaf, tiles = g.x_rows + g.y_rows, leaf_of(p), math.prod(g.tiles()) * p.batch
    most = RING if _crowded(g, tiles, H200) else SHARED
    rooms = [min(most, SHARED - g.beside_the_ring(p) - i * c.sums) for i in range(levels_of(p) + 1)]
    once = g.tiles()[1 if c.swapped else 0] == 1 and p.batch == 1
    for room, depth in itertools.product(rooms, depths):
        stages = _stages(p, depth, lines, room)
        deep = depth > 64 and depth < 2 * p.k and depth * lines <= 128 * 144
        if stages >= (4 if deep else 2) and (deep or depth == 64) and leaf % depth == 0:
            yield replace(c, depth=depth, stages=stages, evict=once)


def _stages(p: Product, depth: int, lines: int, room: int) -> int:
    """As many stages as there is room for; no more than two tiles' walks have."""
    return min(room // (depth * 2 * lines), max(2, 2 * -(-p.k // depth)), 24)


def _crowded(g: Geometry, tiles: int, gpu: Gpu) -> bool:
    """Whether a shorter ring is the faster one: tiles of few rows where the next launch waits for this one."""
    return min(g.x_rows, g.y_rows) <= 16 and late(g.config, tiles, gpu.multiprocessors)


POWER = 5.5  # of times that overlap
# Cycles that a stage takes to be handed over, and from a buffer's release until it is full again.
STAGE, REFILL = 262.0, 2256.0
# Bytes a cycle that a tile stores, cycles before it does, and those that a cluster takes more.
STORE, EPILOGUE, CLUSTER = 9.18, 351.0, 1970.0
START, COLUMN = 6.47, 0.647  # cycles of an instruction, and of each of its columns
CARRY = 14.0  # bytes a cycle of sums that wait in memory: put there, and taken back
# Lines of the model's for one; more for one of the larger operand, which comes from memory, where several tiles read it
# that are not walked one after the other; and for one of the smaller that a cluster shares, in each of its blocks.
LINE, REREAD, SHARED_LINE = 0.654, 0.511, 0.407
# Lines for one, where both operands lie across K and one has fewer rows than most boxes have, 64: all tiles ask for the
# same piece of it for each k.
ACROSS = 1.7
# Lines more for one, where those of an operand begin at no multiples of 128 bytes, and cycles of one on its way into
# shared memory then: what lies in two lines of the cache is asked for twice.
SPLIT, PIECE = 0.62, 3.0
BIASED = 0.07  # cycles of a value whose bias is another in every column
# More than the rest says take a long ring in a crowded launch and, where they tie, tiles of 16 rows; less take swapped
# weights, and a tree in one walk: two thirds of what leaves side by side do.
SWAPPED, SHORTEST, LONG, TREE = -0.06, 0.01, 0.04, -0.33


def expected(p: Product, c: HopperConfig, gpu: Gpu) -> float:
    """Microseconds by the model; see `isogemm.backends.cuda.gemm.model`."""
    g = geometry(p, c)
    assert g is not None
    tiles = math.prod(g.tiles()) * p.batch
    waves = -(-tiles // resident(c, gpu.multiprocessors))
    biased = p.dtype_bias is not None and not c.swapped
    x = g.x_rows / c.cn * (1 + _split(g.x))
    y = g.y_rows / c.cm * min(2.0, (_lines_of_128(c.cols) if g.y.across else 1.0) + _split(g.y))
    across = ACROSS if g.x.across and g.y.across and min(p.m, p.n) < 64 else 1.0
    shared = g.y_rows * (c.cm > 1) if g.x.size >= g.y.size else g.x_rows * (c.cn > 1)
    stages, long = float(c.stages), False
    if _crowded(g, tiles * c.cluster, gpu):  # a ring of RING bytes hides as much as a full one
        lines = g.x_rows + g.y_rows
        long = c.stages * c.depth * 2 * lines > RING
        stages = max(stages, min(stages * SHARED / RING, _stages(p, c.depth, lines, SHARED - g.beside_the_ring(p))))
    issued = (START + COLUMN * c.cols) * -(-c.rows // 64) * 4
    carried = 2 * (2 ** (levels_of(p) - g.inside(p)) - 1)  # sums of a tree that wait in memory, and are met
    cut = Tiling(
        tiles=tiles * c.cluster,
        waves=waves,
        lines=LINE * across * (x + y) + REREAD * _again(p, g) + SHARED_LINE * shared,
        work=together(issued, PIECE * (x + y) * (_split(g.x) + _split(g.y) > 0), power=POWER),
        stage=together(STAGE, REFILL / (stages - 1), power=POWER) * 64 / c.depth,
        store=c.rows * c.cols * (ITEMSIZE[p.dtype_out] / STORE + BIASED * biased + 4 * carried / CARRY)
        + EPILOGUE
        + CLUSTER * (c.cluster > 1),
        stores=1 if c.pingpong else waves,
        late=late(c, tiles * c.cluster, gpu.multiprocessors),
        room=resident(c, gpu.multiprocessors) // c.occupancy * c.cluster,
        depth=c.depth,
        power=POWER,
    )
    ties = SWAPPED * c.swapped + SHORTEST * (c.rows == 16) + LONG * long
    return microseconds(p, cut, gpu) * (1 + ties + TREE * (p.contract.order.kind == "tree"))


def _again(p: Product, g: Geometry) -> float:
    """Lines of the larger operand, which comes from memory, that a tile reads again after others, not beside them."""
    c, (along_x, along_y), group = g.config, g.tiles(), group_of(p, g)
    if g.x.size >= g.y.size:
        return g.x_rows / c.cn if along_y > 1 and (c.cluster > 1 or group > 1) else 0.0
    return g.y_rows / c.cm if along_x > 1 and (c.cluster > 1 or group < along_x) else 0.0


def _split(side: HopperSide) -> float:
    """Lines of the cache that 128 bytes of an operand count for beyond one, by its pitch."""
    return SPLIT * (1 - math.gcd(side.step, 64) / 64)


def _lines_of_128(cols: int) -> float:
    """Lines of the cache that 128 bytes of columns lie in, in the mean over tiles of so many columns."""
    return 2 - math.gcd(cols, 64) / 64
