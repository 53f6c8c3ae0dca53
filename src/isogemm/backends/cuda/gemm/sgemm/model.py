"""What the float32 kernels are expected to take: rounds of blocks, of which a multiprocessor holds several.

Fitted to timings of 81 products on an H200, half of them drawn, the others slow; tiles of few rows to 46 drawn ones
more, and the three largest to these and 27 whose lines are no multiples of 16 bytes; rings that the copy engine fills
to 43 more: docs/design/0014-float32.md.
"""

from __future__ import annotations

from .....problem.product import Product
from ..fp32 import sides
from ..model import together
from .tiles import (
    TILES,
    RingTile,
    SgemmConfig,
    blocks_of,
    boxed,
    copies,
    in_step,
    loads,
    shares_of,
)

# Cycles for one of K: of a block alone on its multiprocessor, which waits, and of each of several, which share what
# bounds them.
WALKS = {
    "128x128 k8": (136, 165),
    "64x128 k8": (166, 75),
    "64x64 k16": (89.5, 43.5),
    "2x16 k128 s5": (4.81, 0.89),
    "2x32 k256 s3": (4.94, 2.68),
    "4x16 k256 s4": (4.1, 2.0),
    "8x8 k128 s5": (6.57, 1.54),
    "12x8 k128 s5": (9.55, 1.71),
    "8x16 k256 s3": (5.53, 4.52),
    "8x16 k128 s4": (8.39, 2.52),
    "8x32 k64 s4": (11.4, 5.7),
    "8x32 k128 s4": (6.81, 6.58),
    "16x16 k128 s3": (15.8, 3.27),
    "20x16 k64 s5": (22.6, 3.66),
    "16x32 k64 s4": (27.8, 5.74),
    "20x32 k64 s4": (34.5, 6.85),
    "32x32 k64 s4": (17.3, 15.5),
    "32x64 k64 s3": (28.7, 26.4),
    "56x64 k32 s4": (36.6, 47.2),
    "40x128 k32 s4": (38.3, 64.5),
    "48x128 k32 s4": (89.1, 70),
}
# The same of rings that the copy engine fills.
FILLED = {
    "12x8 k128 s5": (8.0, 1.75),
    "8x32 k64 s4": (13.5, 4.7),
    "16x16 k128 s3": (13.6, 3.1),
    "20x16 k64 s5": (17.5, 4.2),
    "16x32 k64 s4": (25.8, 5.2),
    "20x32 k64 s4": (33.1, 5.4),
    "32x32 k64 s4": (10, 14.7),
    "32x64 k64 s3": (16, 24.9),
    "56x64 k32 s4": (31, 43.7),
    "40x128 k32 s4": (38, 57.5),
    "48x128 k32 s4": (57, 67.5),
}
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
CYCLES, BYTES = 1980, 4.62e6  # of a microsecond: of a multiprocessor, from memory
START, ROUND = 2.33, 1.64  # microseconds of a launch, and of filling and storing a round of tiles
ZEROED = 6.0  # and of clearing the flags of blocks that share tiles
SHARING = 1.05  # times as long a walk takes that is shared, where panels go through registers
# Cycles for one of K, for each operand that a ring copies along its rows: of each of several blocks, and those that one
# alone takes longer.
LINES, SINGLES = 3.74, 1.85
PIECES = {4: 0.0, 2: 0.06, 1: 0.11}  # and for each row or column of a tile, by the values to a copy
# Built ahead for all products: of 442 drawn ones the best of the first 3 is expected to take 1.18 times as long as the
# best of all in the geometric mean, that of all six 1.09 times. Chosen anew, one by one, they would be no better.
PALETTE = ("16x16 k128 s3", "64x64 k16", "2x16 k128 s5", "32x64 k64 s3", "8x16 k128 s4", "128x128 k8")
# Times as long: copies of operands whose rows, not K, are contiguous; tiles' single loads along rows, and those where
# neighbours along rows lie farther apart than along K (a guess); loads of 4 bytes and of 8 along K.
TURNED, ACROSS, APART = 3.0, 1.13, 2.0
ALONG = {"128x128 k8": (1.0, 1.0), "64x128 k8": (1.35, 1.05), "64x64 k16": (1.22, 1.02)}


def microseconds(p: Product, config: SgemmConfig, multiprocessors: int) -> float:
    """Rounds of blocks, as many as fit at once, or what memory takes for the operands."""
    if config.copied:
        inner, (a, b) = in_step(p, config.tile)
        lines = p.m * a * (1 if p.a.col == 1 else TURNED) + p.n * b * (1 if p.b.row == 1 else TURNED)
        copying = START * (a + b) + 8 * p.k * p.batch * lines / BYTES
        return microseconds(inner, config._replace(copied=False), multiprocessors) + copying
    tile = config.sizes
    if isinstance(tile, RingTile):
        alone, each = (FILLED if boxed(p, tile) else WALKS)[config.tile]
        (deep_a, v_a), (deep_b, v_b) = copies(p, tile)
        across = 2 - deep_a - deep_b
        alone, each = alone + SINGLES * across, together(each, LINES * across)
        each += PIECES[v_a] * tile.m + PIECES[v_b] * tile.n
    else:
        slower = _slower(p, config.tile)
        alone, each = (slower * cycles for cycles in WALKS[config.tile])
    tiles = blocks_of(p, tile) * p.batch
    if config.shared:
        blocks = shares_of(p, tile, multiprocessors).blocks
        parts = tiles / blocks + 1
        cycles = tiles / blocks * together(alone, -(-blocks // multiprocessors) * each)
        cycles *= SHARING if config.tile in TILES else 1.0
    else:
        rounds, rest = divmod(tiles, multiprocessors * tile.blocks)
        parts = rounds + (rest > 0)
        cycles = rounds * together(alone, tile.blocks * each)
        if rest:
            cycles += together(alone, -(-rest // multiprocessors) * each)
    nbytes = 4 * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    fixed = START + ROUND * parts + ZEROED * config.shared
    return fixed + together(p.k * cycles / CYCLES, nbytes / BYTES)


def _slower(p: Product, tile: str) -> float:
    """How many times as long a walk takes where panels go through registers and operands are out of step."""
    odd, half = ALONG[tile]
    slower = {(0, 1): odd, (0, 2): half, (2, 1): ACROSS}
    apart = [load == (2, 1) and abs(side.k) < abs(side.row) for load, side in zip(loads(p), sides(p), strict=True)]
    return APART if any(apart) else max(slower.get(load, 1.0) for load in loads(p))
