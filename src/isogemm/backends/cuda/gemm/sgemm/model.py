"""What the float32 kernels are expected to take: rounds of blocks, of which a multiprocessor holds several.

Fitted to timings of 120 products on an H200, 72 drawn, the others chosen as slow: docs/design/0011-cost-model.md.
"""

from __future__ import annotations

from .....problem.product import Product
from ..model import together
from .tiles import COPIED, RINGS, TILES, blocks_of, copies, in_step, modes, out_of_step

# Cycles for one of K: of a block alone on its multiprocessor, which waits, and of each of several, which share what
# bounds them.
WALKS = {
    "128x128 k8": (192, 156),
    "64x128 k8": (161, 76.4),
    "64x64 k16": (68.5, 44.8),
    "2x16 k128 s5": (5, 1.34),
    "4x8 k128 s6": (3.49, 1.79),
    "4x16 k64 s8": (5.89, 2.46),
    "8x8 k128 s5": (6.96, 2.78),
    "8x16 k64 s8": (9.99, 3.25),
    "8x32 k64 s4": (14.9, 5.84),
    "16x32 k64 s4": (15.2, 8.49),
    "32x12 k64 s6": (7.19, 10.7),
    "32x32 k64 s4": (22.1, 13.9),
    "32x64 k64 s3": (31.3, 25.9),
    "48x64 k32 s4": (39.9, 39.9),
    "56x64 k32 s4": (57.5, 48.9),
    "32x128 k32 s4": (74.6, 42.5),
    "40x128 k32 s4": (63.4, 61),
    "48x128 k32 s4": (94.9, 59.4),
}
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
CYCLES, BYTES = 1980, 4.5e6  # of a microsecond: of a multiprocessor, from memory
START, ROUND = 2.43, 0.815  # microseconds of a launch, and of filling and storing a round of tiles
UNEVEN = 0.163  # of the room that a last round leaves: blocks do not spread evenly
LINES = 4.2  # cycles for one of K, of a ring that copies an operand along its rows
# Times as long: a ring's copies of 4 bytes; single loads of tiles along rows, and along K; copies of such operands.
RING_ODD, ACROSS, ALONG, COPY_ALONG = 1.15, 1.16, 2.0, 1.08


def microseconds(p: Product, config: str, multiprocessors: int) -> float:
    """Rounds of blocks, as many as fit at once, or what memory takes for the operands."""
    name = config.removesuffix(COPIED)
    if config.endswith(COPIED):
        inner, (a, b) = in_step(p, name)
        copied = 8 * p.k * p.batch * (p.m * a + p.n * b)
        slower = COPY_ALONG if name in TILES and max(modes(p)) == 3 else 1.0
        return slower * microseconds(inner, name, multiprocessors) + START + copied / BYTES
    tile = RINGS.get(name) or TILES[name]
    alone, each = WALKS[name]
    if name in RINGS and not all(deep for deep, _ in copies(p, RINGS[name])):
        each = together(each, LINES)
    rounds, rest = divmod(blocks_of(p, tile) * p.batch, multiprocessors * tile.blocks)
    cycles = rounds * together(alone, tile.blocks * each)
    if rest:
        beside: float = -(-rest // multiprocessors)
        beside += UNEVEN * (tile.blocks - beside) * (beside > 1)
        cycles += together(alone, beside * each)
    nbytes = 4 * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    fixed = START + ROUND * (rounds + (rest > 0))
    return fixed + together(p.k * cycles * _slower(p, name) / CYCLES, nbytes / BYTES)


def _slower(p: Product, config: str) -> float:
    """How many times as long the walk takes where operands are out of step."""
    if config in RINGS:
        return RING_ODD if any(out_of_step(p, config)) else 1.0
    return {2: ACROSS, 3: ALONG}.get(max(modes(p)), 1.0)
