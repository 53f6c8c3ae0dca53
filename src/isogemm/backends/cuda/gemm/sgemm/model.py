"""What the float32 kernels are expected to take: rounds of blocks, of which a multiprocessor holds several.

Fitted to timings of 75 products on an H200, half of them drawn, the others slow: docs/design/0011-cost-model.md.
"""

from __future__ import annotations

from .....problem.product import Product
from ..model import together
from .tiles import COPIED, RINGS, TILES, blocks_of, copies, in_step, modes, out_of_step

# Cycles for one of K: of a block alone on its multiprocessor, which waits, and of each of several, which share what
# bounds them.
WALKS = {
    "128x128 k8": (178, 150),
    "64x128 k8": (120, 80.6),
    "64x64 k16": (80.4, 46.6),
    "2x16 k128 s5": (4.59, 1.63),
    "4x8 k128 s6": (5.84, 1.77),
    "4x16 k64 s8": (8.54, 2.48),
    "8x8 k128 s5": (7.11, 1.83),
    "8x16 k64 s8": (8.56, 3.58),
    "8x32 k64 s4": (11.7, 5.61),
    "16x32 k64 s4": (11.5, 9.9),
    "32x12 k64 s6": (8.72, 8.46),
    "32x32 k64 s4": (16.7, 15.2),
    "32x64 k64 s3": (27.7, 27.9),
    "48x64 k32 s4": (43.2, 40.4),
    "56x64 k32 s4": (49.8, 46.4),
    "32x128 k32 s4": (60.6, 52),
    "40x128 k32 s4": (58.7, 64.1),
    "48x128 k32 s4": (74.4, 76.4),
}
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
CYCLES, BYTES = 1980, 4.5e6  # of a microsecond: of a multiprocessor, from memory
START, ROUND = 2.43, 1.68  # microseconds of a launch, and of filling and storing a round of tiles
LINES = 3.49  # cycles for one of K, of a ring that copies an operand along its rows
# Times as long: a ring's copies of 4 bytes; single loads of tiles along rows, and along K.
RING_ODD, ACROSS, ALONG = 1.15, 1.13, 2.0


def microseconds(p: Product, config: str, multiprocessors: int) -> float:
    """Rounds of blocks, as many as fit at once, or what memory takes for the operands."""
    name = config.removesuffix(COPIED)
    if config.endswith(COPIED):
        inner, (a, b) = in_step(p, name)
        copied = 8 * p.k * p.batch * (p.m * a + p.n * b)
        return microseconds(inner, name, multiprocessors) + START + copied / BYTES
    tile = RINGS.get(name) or TILES[name]
    alone, each = WALKS[name]
    if name in RINGS and not all(deep for deep, _ in copies(p, RINGS[name])):
        each = together(each, LINES)
    rounds, rest = divmod(blocks_of(p, tile) * p.batch, multiprocessors * tile.blocks)
    cycles = rounds * together(alone, tile.blocks * each)
    if rest:
        cycles += together(alone, -(-rest // multiprocessors) * each)
    nbytes = 4 * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    fixed = START + ROUND * (rounds + (rest > 0))
    return fixed + together(p.k * cycles * _slower(p, name) / CYCLES, nbytes / BYTES)


def _slower(p: Product, config: str) -> float:
    """How many times as long the walk takes where operands are out of step."""
    if config in RINGS:
        return RING_ODD if any(out_of_step(p, config)) else 1.0
    return {2: ACROSS, 3: ALONG}.get(max(modes(p)), 1.0)
