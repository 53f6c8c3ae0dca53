"""Configurations of the Hopper kernels, and a product as those kernels see it: what is legal, and what it takes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .....base.dtypes import CODE, ITEMSIZE
from .....problem.product import Product, Strides

OPERANDS = {"bfloat16": "bf16", "float16": "f16"}
SHARED = 232448 - 1024  # bytes of dynamic shared memory that a block may have, less the barriers
NEIGHBOURS = 8  # tiles beside one another, where there are more
HELD = 24 * 2**20  # bytes of an operand that stay in L2 while the other goes by
TEXT = re.compile(r"(w?)(\d+)x(\d+)x(\d+) s(\d+)(?: c(\d)x(\d))?( pp)?(?: o(\d))?(?: g(\d+))?( e)?")


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """A configuration, read.

    Attributes
    ----------
    swapped : bool
        B is the kernel's first operand: its rows are the product's columns.
    rows, cols, depth : int
        Of a block's tile; fewer than 64 rows are part of an instruction's. `depth` in elements of 2 bytes.
    stages, cm, cn, pingpong, occupancy, group, evict
        As in the text of hopper.py.
    """

    swapped: bool
    rows: int
    cols: int
    depth: int
    stages: int
    cm: int = 1
    cn: int = 1
    pingpong: bool = False
    occupancy: int = 1
    group: int = 0
    evict: bool = False

    @classmethod
    def parse(cls, text: str) -> HopperConfig | None:
        """Read a text; None where it is not one."""
        match = TEXT.fullmatch(text)
        if match is None:
            return None
        w, rows, cols, depth, stages, cm, cn, pp, o, g, e = match.groups()
        sizes = int(rows), int(cols), int(depth), int(stages), int(cm or 1), int(cn or 1)
        return cls(bool(w), *sizes, bool(pp), int(o or 1), int(g or 0), bool(e))

    def __str__(self) -> str:
        text = f"{'w' * self.swapped}{self.rows}x{self.cols}x{self.depth} s{self.stages}"
        text += f" c{self.cm}x{self.cn}" * (self.cluster > 1) + " pp" * self.pingpong
        text += f" o{self.occupancy}" * (self.occupancy > 1) + f" g{self.group}" * (self.group > 0)
        return text + " e" * self.evict

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cm * self.cn

    @property
    def warpgroups(self) -> int:
        """Consumers: one for 64 rows, up to three; two own 128 rows each where there are 256, or alternate tiles."""
        return 2 if self.pingpong or self.rows == 256 else -(-self.rows // 64)

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows that one consumer holds."""
        return -(-self.rows // 64) // (1 if self.pingpong else self.warpgroups)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 160 if self.warpgroups == 1 else 128 * (self.warpgroups + 1)

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.blocks * self.cols // 2

    @property
    def sums(self) -> int:
        """Bytes of a float32 for each of a block's accumulators."""
        return 512 * self.warpgroups * self.accumulators

    @property
    def totals(self) -> int:
        """Leaf totals that stay in registers; the others lie in shared memory.

        Registers hold 96 + 96; of 128 accumulators, 64 totals leave no spill inside the walk.
        """
        room = 96 if self.warpgroups < 3 else 48
        return self.accumulators if self.accumulators <= room else room - 32

    @property
    def registers(self) -> int:
        """Sums that a thread has room for."""
        if self.occupancy > 1:
            return 80
        return 192 if self.warpgroups < 3 else 96


@dataclass(frozen=True, slots=True)
class HopperSide:
    """An operand as the kernel sees it: rows of K.

    Attributes
    ----------
    size : int
        Rows.
    step : int
        Elements from line to line: of rows where K is contiguous, else of K.
    batch : int
        Elements from item to item, 0 where all share one.
    across : bool
        Rows, not K, are contiguous.
    """

    size: int
    step: int
    batch: int
    across: bool


def _side(x: Strides, row: int, k: int, size: int, depth: int, batch: int) -> HopperSide | None:
    """`row` and `k` are the strides of a row and of K; None where neither is contiguous."""
    each = x.batch if batch > 1 else 0
    if k == 1 or depth == 1:
        return HopperSide(size, row if size > 1 else -(-depth // 8) * 8, each, False)
    if row == 1 or size == 1:
        return HopperSide(size, k, each, True)
    return None


def _sides(p: Product, swapped: bool) -> tuple[HopperSide | None, HopperSide | None]:
    a = _side(p.a, p.a.row, p.a.col, p.m, p.k, p.batch)
    b = _side(p.b, p.b.col, p.b.row, p.n, p.k, p.batch)
    return (b, a) if swapped else (a, b)


@dataclass(frozen=True, slots=True)
class Geometry:
    """A product in the kernel's terms: D[r, c] = sum of X[r, k] Y[c, k]."""

    config: HopperConfig
    x: HopperSide
    y: HopperSide
    columns: bool  # D's rows, not its columns, are contiguous
    out_step: int

    @property
    def x_rows(self) -> int:
        """Rows of X that are loaded: fewer than the tile's where X has no more."""
        rows = self.config.rows
        if self.x.across or rows > 64:
            return rows
        return min(rows, max(8, 1 << (self.x.size - 1).bit_length()))

    @property
    def x_line(self) -> int:
        """Rows of X in a line of shared memory, where these are contiguous."""
        return min(self.config.rows, 64)

    @property
    def y_rows(self) -> int:
        """Rows of 128 bytes that Y fills in a block of a stage."""
        return -(-self.config.cols // 64) * 64 if self.y.across else self.config.cols

    def shared(self, p: Product) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self._ring(p) + self.inside(p) * self.config.sums

    def inside(self, p: Product) -> int:
        """Levels of a tree whose sums wait in shared memory, where the ring leaves room for them."""
        room = (SHARED + 1024) // self.config.occupancy - 1024 - self._ring(p)
        return min(levels_of(p), max(0, room) // self.config.sums)

    def _ring(self, p: Product) -> int:
        c = self.config
        return self.beside_the_ring(p) + c.stages * c.depth * 2 * (self.x_rows + self.y_rows)

    def beside_the_ring(self, p: Product) -> int:
        """Bytes that the ring cannot have."""
        c = self.config
        spilled = (c.accumulators - c.totals) * 512 * c.warpgroups if has_totals(p) else 0
        # What the last instructions read beyond a short operand; of short lines across K they read the same ones again.
        over = 0 if self.x.across else max(0, max(64, c.rows) - self.x_rows) * 128
        turns = self.columns and ITEMSIZE[p.dtype_out] == 2
        return 1024 + spilled + max(over, turned(c.warpgroups, c.cols) * turns)  # nothing of `over` counts

    def chunks(self, p: Product) -> tuple[int, int]:
        """Chunks of 64 of K in a copy of X, and in one of Y: all that a block loads of a stage; 0: a copy for each."""
        c = self.config
        return self._chunks(p, self.x, self.x_rows, c.cn), self._chunks(p, self.y, c.cols, c.cm)

    def _chunks(self, p: Product, side: HopperSide, rows: int, split: int) -> int:
        each, rest = divmod(self.config.depth // 64, split)
        # A box has up to 256 lines. Along K trials have whole chunks of one product alone, and of no leaves or start.
        along = p.k % 64 == 0 and p.batch == 1 and not p.accumulate and p.contract.order.kind != "leaf"
        fits = rows <= 64 and each <= 4 if side.across else along
        return each if self.config.depth > 64 and not rest and fits else 0

    def tiles(self) -> tuple[int, int]:
        """Cluster tiles along X and Y."""
        c = self.config
        return -(-self.x.size // (c.rows * c.cm)), -(-self.y.size // (c.cols * c.cn))


def turned(warpgroups: int, cols: int) -> int:
    """Bytes in which results of 16 bits are turned where rows are contiguous: see include/hopper_epilogue.cu."""
    return (4096 if cols > 32 else 2048) * warpgroups


def geometry(p: Product, c: HopperConfig) -> Geometry | None:
    """None where an operand or the output has no contiguous axis."""
    x, y = _sides(p, c.swapped)
    row, col = (p.out.col, p.out.row) if c.swapped else (p.out.row, p.out.col)
    if x is None or y is None:
        return None
    if col == 1 or y.size == 1:
        return Geometry(c, x, y, False, row if x.size > 1 else y.size)
    if row == 1 or x.size == 1:
        return Geometry(c, x, y, True, col)
    return None


def leaf_of(p: Product) -> int:
    """Elements of K in a leaf; 0 of a chain."""
    order = p.contract.order
    if order.kind == "tree":
        return p.k // order.size
    return order.size if order.kind == "leaf" else 0


def quads_of(p: Product) -> int:
    """Fours of leaves in a tree, which meet in registers; 0 of another order, and of a tree of two."""
    order = p.contract.order
    return order.size // 4 if order.kind == "tree" else 0


def levels_of(p: Product) -> int:
    """Levels of a tree above its quads: sums of each wait for their neighbours'."""
    return max(1, quads_of(p)).bit_length() - 1


def has_totals(p: Product) -> bool:
    """Whether leaves are added up, one after the other."""
    return leaf_of(p) > 0 and not quads_of(p)


def serves(p: Product, c: HopperConfig | None = None) -> bool:
    """Whether these kernels serve a product at all, or with a configuration."""
    return _product_ok(p) and (c is None or fits(p, c))


def _product_ok(p: Product) -> bool:
    order = p.contract.order
    if p.contract.arithmetic != "tensor_core:sm90" or (order.kind == "tree" and p.k % (64 * order.size)):
        return False
    if p.dtype_a != p.dtype_b or p.dtype_a not in OPERANDS or p.dtype_out not in CODE:
        return False
    if min(p.m, p.n, p.k, p.batch) < 1 or max(p.m, p.n, p.k, p.batch) >= 2**30 or p.align < 16:
        return False
    if p.accumulate and (p.c is None or p.dtype_c != "float32"):
        return False
    return all(side is not None and _readable(side, p.k) for side in _sides(p, False))


def _readable(side: HopperSide, k: int) -> bool:
    """The copy engine steps by multiples of 16 bytes, from line to line and from item to item."""
    least = side.size if side.across else k
    return side.step % 8 == 0 and side.batch % 8 == 0 and 0 <= side.batch < 2**38 and least <= side.step < 2**38


def fits(p: Product, c: HopperConfig) -> bool:
    """Whether a configuration is legal for a product that is served at all."""
    g = geometry(p, c)
    if g is None or c.depth % 64 or c.stages < 2 or c.cluster > 8 or not {c.cm, c.cn} <= {1, 2, 4, 8}:
        return False
    tiles = (64, 128) if c.pingpong else (16, 32, 64, 128, 192, 256)
    sums = c.accumulators * (3 if quads_of(p) else 1) + c.totals * has_totals(p)
    if c.rows not in tiles or c.cols % 8 or not 8 <= c.cols <= 256 or sums > c.registers:
        return False
    if c.occupancy > 1 and c.warpgroups > 1:
        return False
    if math.prod(g.tiles()) * p.batch >= 2**30:  # the kernel counts them in 32 bits
        return False
    return leaf_of(p) % c.depth == 0 and c.occupancy * (g.shared(p) + 1024) <= SHARED + 1024


def resident(c: HopperConfig, multiprocessors: int) -> int:
    """Clusters that run at once: multiprocessors come in groups of at most 18, and a cluster stays inside of one."""
    room = multiprocessors if c.cluster <= 2 else multiprocessors // 11 * 10
    return room * c.occupancy // c.cluster


def group_of(p: Product, g: Geometry) -> int:
    """Tiles along X that are walked together, Y slowest; with 1 all of Y is walked for each of X.

    Blocks that follow one another lie side by side, and should read the same lines of the larger operand. Where that is
    X and Y has few tiles, all of these are walked before X goes on; blocks of a cluster share lines anyway. Otherwise a
    group is all of X where that stays in L2 beside the rest, so that Y is read once, and else eight tiles of it.
    """
    c, (along_x, along_y) = g.config, g.tiles()
    if c.group:
        return min(c.group, along_x)
    if c.cluster == 1 and along_y <= NEIGHBOURS and along_y < along_x and g.y.size <= g.x.size:
        return 1
    return min(max(NEIGHBOURS // c.cm, HELD // (2 * p.k * c.rows * c.cm)), along_x)


def late(c: HopperConfig, blocks: int, multiprocessors: int) -> bool:
    """Whether the next launch's blocks may come only when these have taken in all of their operands.

    Blocks that come before that lie on what is free: where two launches do not fit beside one another, the later one's
    lie unevenly, and what a multiprocessor takes in depends on its neighbours. Tiles of few rows or columns, which
    memory bounds, are up to a fifth faster so; where a launch all but fills the GPU, or half of it, they are not.
    """
    narrow = c.cluster == c.occupancy == 1 and min(c.rows, c.cols) <= 64
    return narrow and multiprocessors // 2 < blocks < multiprocessors * 9 // 10
