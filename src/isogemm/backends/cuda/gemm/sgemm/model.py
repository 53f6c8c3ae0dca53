"""What the float32 kernels are expected to take: rounds of blocks, of which a multiprocessor holds several.

Fitted to timings of 63 products on an H200, half of them drawn, half chosen as slow: docs/design/0011-cost-model.md.
"""

from __future__ import annotations

from .....problem.product import Product
from ..model import together
from .tiles import COPIED, RINGS, TILES, blocks_of, copies, in_step, modes, out_of_step

# Cycles for one of K: of a block alone on its multiprocessor, which waits, and of each of several, which share what
# bounds them.
WALKS = {
    "128x128 k8": (202, 183),
    "64x128 k8": (180, 70.5),
    "64x64 k16": (65.9, 45.9),
    "2x16 k128 s5": (4.44, 1.44),
    "4x8 k128 s6": (3.6, 1.49),
    "4x16 k64 s8": (6.61, 2.56),
    "8x8 k128 s5": (6.8, 2.89),
    "8x16 k64 s8": (12, 2.53),
    "8x32 k64 s4": (16, 4.58),
    "16x32 k64 s4": (15.5, 8.58),
    "32x12 k64 s6": (7.76, 8.95),
    "32x32 k64 s4": (21.7, 14.1),
    "32x64 k64 s3": (31.4, 27.2),
    "48x64 k32 s4": (38.6, 42.4),
    "56x64 k32 s4": (36.9, 49.7),
}
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
CYCLES, BYTES = 1980, 3.9e6  # of a microsecond: of a multiprocessor, from memory
START, ROUND = 2.19, 0.91  # microseconds of a launch, and of filling and storing a round of tiles
UNEVEN = 0.17  # of the room that a last round leaves: blocks do not spread evenly
LINES = 4.46  # cycles for one of K, of a ring that copies an operand along its rows
# Times as long: a ring's copies of 4 bytes; single loads of tiles along rows, and along K; copies of such operands.
RING_ODD, ACROSS, ALONG, COPY_ALONG = 1.2, 1.08, 2.0, 1.3


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
