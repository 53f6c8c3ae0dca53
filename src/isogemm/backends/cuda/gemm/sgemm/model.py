"""What the float32 kernels are expected to take: rounds of blocks, of which a multiprocessor holds several.

Fitted to timings of 80 products on an H200, 60 of them drawn, 20 chosen as slow: docs/design/0011-cost-model.md.
"""

from __future__ import annotations

from .....problem.product import Product
from ..model import together
from .tiles import COPIED, RINGS, TILES, blocks_of, copies, in_step, modes, out_of_step

# Cycles for one of K: of a block alone on its multiprocessor, which waits, and of each of several, which share what
# bounds them.
WALKS = {
    "128x128 k8": (193, 146),
    "64x128 k8": (170, 72.4),
    "64x64 k16": (62.7, 44.6),
    "2x16 k128 s5": (4.86, 1.31),
    "4x8 k128 s6": (3.46, 1.86),
    "4x16 k64 s8": (6.08, 2.45),
    "8x8 k128 s5": (7, 2.96),
    "8x16 k64 s8": (9.87, 3.26),
    "8x32 k64 s4": (15.4, 5.81),
    "16x32 k64 s4": (15.6, 8.06),
    "32x12 k64 s6": (7.29, 10.6),
    "32x32 k64 s4": (22.3, 13.8),
    "32x64 k64 s3": (32.1, 25.3),
    "48x64 k32 s4": (37, 39.9),
    "56x64 k32 s4": (56.1, 47.3),
}
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
CYCLES, BYTES = 1980, 4.5e6  # of a microsecond: of a multiprocessor, from memory
START, ROUND = 2.34, 0.822  # microseconds of a launch, and of filling and storing a round of tiles
UNEVEN = 0.16  # of the room that a last round leaves: blocks do not spread evenly
LINES = 4.46  # cycles for one of K, of a ring that copies an operand along its rows
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
