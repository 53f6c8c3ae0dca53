"""Tiles of the float32 kernels, and a product as they see it: how each operand is loaded, and what is copied."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from .....problem.product import Product, Strides
from ..fp32 import Fp32Side, sides


class BlockTile(NamedTuple):
    """A block's tile, its panel of K, a thread's part of the tile, and blocks to a multiprocessor."""

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    blocks: int


class RingTile(NamedTuple):
    """What `BlockTile` has; lanes of a warp along m, buffers of the ring, and steps of 4 of K that are read ahead.

    `engine`: whether the copy engine fills the ring where it can. A thread of few sums loses nothing to a copying warp,
    whose small copies are there sooner.
    """

    m: int
    n: int
    thread_m: int
    thread_n: int
    lanes: int
    k: int
    stages: int
    ahead: int
    blocks: int
    engine: bool


TILES = {
    "128x128 k8": BlockTile(128, 128, 8, 8, 8, 2),
    "64x128 k8": BlockTile(64, 128, 8, 8, 8, 3),
    "64x64 k16": BlockTile(64, 64, 16, 8, 4, 4),
}
RINGS = {
    "2x16 k128 s5": RingTile(2, 16, 1, 1, 2, 128, 5, 3, 4, False),
    "2x32 k256 s3": RingTile(2, 32, 1, 1, 2, 256, 3, 3, 2, False),
    "4x16 k256 s4": RingTile(4, 16, 1, 1, 4, 256, 4, 3, 2, False),
    "8x8 k128 s5": RingTile(8, 8, 2, 1, 4, 128, 5, 7, 5, False),
    "12x8 k128 s5": RingTile(12, 8, 3, 1, 4, 128, 5, 3, 4, True),
    "8x16 k256 s3": RingTile(8, 16, 2, 1, 4, 256, 3, 3, 3, False),
    "8x16 k128 s4": RingTile(8, 16, 2, 2, 4, 128, 4, 3, 4, False),
    "8x32 k64 s4": RingTile(8, 32, 2, 2, 4, 64, 4, 1, 5, True),
    "8x32 k128 s4": RingTile(8, 32, 2, 2, 4, 128, 4, 1, 2, False),
    "16x16 k128 s3": RingTile(16, 16, 4, 2, 4, 128, 3, 1, 4, True),
    "20x16 k64 s5": RingTile(20, 16, 5, 2, 4, 64, 5, 1, 4, True),
    "16x32 k64 s4": RingTile(16, 32, 4, 4, 4, 64, 4, 1, 4, True),
    "20x32 k64 s4": RingTile(20, 32, 5, 4, 4, 64, 4, 1, 4, True),
    "32x32 k64 s4": RingTile(32, 32, 4, 2, 8, 64, 4, 1, 3, True),
    "32x64 k64 s3": RingTile(32, 64, 4, 4, 4, 64, 3, 1, 3, True),
    "56x64 k32 s4": RingTile(56, 64, 7, 4, 8, 32, 4, 1, 3, True),
    "40x128 k32 s4": RingTile(40, 128, 5, 8, 8, 32, 4, 1, 2, True),
    "48x128 k32 s4": RingTile(48, 128, 6, 8, 8, 32, 4, 1, 2, True),
}
SHARED, COPIED = " sk", " copied"
LINE = 32  # of K, that a line of a ring's buffer has
MOST_OF_A_TEAM = 8  # blocks, one to each tile along m


class SgemmConfig(NamedTuple):
    """A configuration, read: a tile, whether blocks have shares of all tiles, and whether operands are copied."""

    tile: str
    shared: bool
    copied: bool

    @classmethod
    def parse(cls, text: str) -> SgemmConfig | None:
        """Read a text; None where it is not one."""
        inner = text.removesuffix(COPIED)
        name = inner.removesuffix(SHARED)
        return cls(name, name != inner, inner != text) if name in RINGS or name in TILES else None

    @property
    def sizes(self) -> BlockTile | RingTile:
        """The tile that the name stands for."""
        return RINGS.get(self.tile) or TILES[self.tile]

    def __str__(self) -> str:
        return self.tile + SHARED * self.shared + COPIED * self.copied


CONFIGS = tuple(
    SgemmConfig(name, shared, copied)
    for name in (*TILES, *RINGS)
    for shared in (False, True)
    for copied in (False, True)
)


class Shares(NamedTuple):
    """How blocks share all tiles: `teams` of `size` blocks, which walk `columns` of as many tiles, laid end to end."""

    teams: int
    size: int
    columns: int

    @property
    def blocks(self) -> int:
        """How many there are in all."""
        return self.teams * self.size

    @property
    def uneven(self) -> bool:
        """Whether teams share any column: else each has whole ones."""
        return self.columns % self.teams > 0


def shares_of(p: Product, tile: BlockTile | RingTile, multiprocessors: int) -> Shares:
    """Shares of as many blocks as run at once, but of no more than there are tiles: at most two share one."""
    tiles, rows = blocks_of(p, tile) * p.batch, -(-p.m // tile.m)
    size = next(d for d in range(MOST_OF_A_TEAM, 0, -1) if rows % d == 0)
    at_once = min(sure_of(p, tile), tiles // multiprocessors) * multiprocessors or tiles - 1
    return Shares(max(1, at_once // size), size, tiles // size)


def sure_of(p: Product, tile: BlockTile | RingTile) -> int:
    """Blocks that a multiprocessor surely has registers for: in wide tiles a second warp that copies takes some."""
    wide = tile.blocks < 4 <= tile.thread_m
    return tile.blocks - (isinstance(tile, RingTile) and wide and copiers_of(p, tile) > 1)


def copiers_of(p: Product, tile: RingTile) -> int:
    """Warps of a ring's block that copy: two where pieces have less than 16 bytes."""
    return 1 if min(values for _, values in copies(p, tile)) == 4 else 2


def boxed(p: Product, tile: RingTile) -> bool:
    """Whether the copy engine fills a ring: all lines of both operands begin at multiples of 16 bytes."""
    return tile.engine and min(values for _, values in copies(p, tile)) == 4


def apart(p: Product) -> bool:
    """Whether lines and items of both operands lie one behind another, as the copy engine needs it."""
    return all(side.batch >= 0 and side.k > 0 and (side.rows == 1 or side.row > 0) for side in sides(p))


def out_of_step(p: Product, tile: str) -> tuple[bool, bool]:
    """Whether a kernel has to load or copy less than 16 bytes of A at once, and of B."""
    if tile in TILES:
        a, b = (values < 4 for _, values in loads(p))
    else:
        a, b = (values < 4 for _, values in copies(p, RINGS[tile]))
    return a, b


def pitch_of(p: Product) -> int:
    """From row to row of a copy, whose rows begin lines of the cache."""
    return -(-p.k // LINE) * LINE


def in_step(p: Product, tile: str) -> tuple[Product, tuple[bool, bool]]:
    """The product of copies whose rows of K lie a multiple of 128 bytes apart, and which of A and B are copied."""
    a, b = out_of_step(p, tile)
    pitch = pitch_of(p)
    x = Strides(pitch, 1, p.m * pitch if p.batch > 1 and p.a.batch else 0) if a else p.a
    y = Strides(1, pitch, p.n * pitch if p.batch > 1 and p.b.batch else 0) if b else p.b
    return replace(p, a=x, b=y), (a, b)


def blocks_of(p: Product, tile: BlockTile | RingTile) -> int:
    """Tiles of one item of a batch."""
    return -(-p.m // tile.m) * -(-p.n // tile.n)


def loads(p: Product) -> list[tuple[int, int]]:
    """How each operand's panels are loaded, and how many values at once; the numbers of gemm/sgemm/sgemm.cu."""
    return [_loaded(side, p) for side in sides(p)]


def _loaded(side: Fp32Side, p: Product) -> tuple[int, int]:
    deep, values = _copied(side, p, 4)
    if deep and side.k == 1:
        return 0, values
    return (1, 4) if values == 4 and side.rows % 4 == 0 else (2, 1)


def copies(p: Product, tile: RingTile) -> list[tuple[bool, int]]:
    """For A and for B, whether a ring copies it along k, and how many values at once."""
    a, b = sides(p)
    return [_copied(a, p, tile.m), _copied(b, p, tile.n)]


def _copied(side: Fp32Side, p: Product, rows: int) -> tuple[bool, int]:
    deep = side.rows == 1 or side.k == 1 or 0 < abs(side.k) < abs(side.row)
    step, unit = (side.row if side.rows > 1 else 0, side.k) if deep else (side.k, side.row)
    cut = 0 if deep else rows
    values = next((v for v in (4, 2) if p.align >= 4 * v and not any(x % v for x in (step, side.batch, cut))), 1)
    return deep, values if unit == 1 else 1
