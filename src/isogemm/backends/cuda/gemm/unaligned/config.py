"""Configurations of the kernel for weights out of step, and a product as it sees it: what is legal, how it is cut."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from .....problem.product import Product, Strides
from ..hopper.config import OPERANDS, SHARED, Geometry, HopperConfig, geometry, serves, turned
from ..padded.family import WORDS, Copy, copy_of

MOST_M = 512  # rows of A: beyond, a copy of the weights costs little beside the product
MOST_COLS = 128
FEW = 16  # rows of A, below which a copy of it has K contiguous; more, up to the 64 of gemm/padded, were not timed
STAGES = 2, 32  # at least, and at most
TEXT = re.compile(r"(32|64|128)x(\d+)x(128|256)(?: c([24]))?")


@dataclass(frozen=True, slots=True)
class UnalignedConfig:
    """A configuration, read; see the text of family.py. `rows` are at most of a tile."""

    rows: int
    cols: int
    depth: int
    cluster: int = 1

    @classmethod
    def parse(cls, text: str) -> UnalignedConfig | None:
        """Read a text; None where it is not one."""
        match = TEXT.fullmatch(text)
        return None if match is None else cls(*(int(x or 1) for x in match.groups()))

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth}" + f" c{self.cluster}" * (self.cluster > 1)

    @property
    def warpgroups(self) -> int:
        """Consumers."""
        return -(-self.rows // 64)


@dataclass(frozen=True, slots=True)
class UnalignedProduct:
    """A product of which A can be read by a tensor map, and the copy that makes it so."""

    product: Product
    copy: Copy | None


@lru_cache(maxsize=4096)
def readable(p: Product) -> UnalignedProduct | None:
    """None where the kernel does not serve a product, or need not: where a tensor map reads B."""
    if p.dtype_a not in OPERANDS or p.contract.order.kind != "chain" or not 1 <= p.m <= MOST_M or p.align < 2:
        return None
    step, each = p.b.col if p.b.row == 1 else p.b.row, p.b.batch if p.batch > 1 else 0
    if 1 not in (p.b.row, p.b.col) or (p.align >= 16 and step % 8 == 0 and each % 8 == 0):
        return None
    copy = copy_of(p.a, p.m, p.k, p.batch, p.m < FEW, aligned=p.align >= 16)
    seen = replace(p, a=copy.strides) if copy else p
    whole = -(-p.k // 8) * 8
    hopper_s = replace(seen, b=Strides(1, whole, whole * p.n), align=max(p.align, 16))
    fits = max(abs(step), abs(each)) < 2**38 and (copy is None or copy.nbytes // 16 < WORDS)
    return UnalignedProduct(seen, copy) if fits and serves(hopper_s) else None


@dataclass(frozen=True, slots=True)
class UnalignedCut:
    """A product in tiles, for a number of multiprocessors.

    Attributes
    ----------
    config : UnalignedConfig
    geometry : Geometry
        As Hopper's kernels see a product whose weights are their first operand.
    rows : int
        Columns of B that one warpgroup has.
    tiles : (int, int)
        Of whole clusters, along columns of B and along rows of A.
    clusters, waves : int
        Clusters that run at once, and how often.
    stage, stages : int
        Bytes of one, and how many.
    """

    config: UnalignedConfig
    geometry: Geometry
    rows: int
    tiles: tuple[int, int]
    clusters: int
    waves: int
    stage: int
    stages: int


def cut(p: Product, c: UnalignedConfig, multiprocessors: int) -> UnalignedCut | None:
    """Columns of B shared evenly among waves; None where a configuration is not legal for the (readable) product."""
    g = geometry(p, HopperConfig(True, 64, c.cols, c.depth, STAGES[0]))
    if (
        g is None
        or not 8 <= c.cols <= MOST_COLS
        or c.cols % (8 * c.cluster)
        or _stages(c, _stage(g, c, c.rows)) < STAGES[0]
    ):
        return None
    clusters = (multiprocessors if c.cluster <= 2 else multiprocessors // 11 * 10) // c.cluster
    others = -(-p.m // c.cols) * p.batch
    waves = -(-(-(-p.n // (c.rows * c.cluster)) * others) // clusters)
    sharing = clusters * waves // others * c.cluster * c.warpgroups
    unit = 8 if g.out_step % 8 == 0 else 1  # of stores of 16 bytes
    rows = -(-p.n // (sharing * unit)) * unit
    stage = _stage(g, c, rows * c.warpgroups)
    stages = min(_stages(c, stage), STAGES[1], 2 * -(-p.k // c.depth) + 1)
    tiles = -(-p.n // (rows * c.warpgroups * c.cluster)), -(-p.m // c.cols)
    return UnalignedCut(c, g, rows, tiles, clusters, waves, stage, stages)


def _stage(g: Geometry, c: UnalignedConfig, rows: int) -> int:
    """Bytes of a stage: lines of W and 16 bytes more each, and rows of x."""
    lines = c.depth * (2 * c.rows + 16) if g.x.across else rows * (2 * c.depth + 16)
    return -(-lines // 1024) * 1024 + 2 * c.depth * g.y_rows


def _stages(c: UnalignedConfig, stage: int) -> int:
    return (SHARED - 1024 - turned(c.warpgroups, c.cols)) // stage
