"""float32 products by fused multiply-adds in ascending k: the CPU's own bits, at the rate of the CUDA cores.

Configurations
--------------
``128x128 k8``  tiles of 128 x 128 and panels of 8 of K, see gemm/sgemm/sgemm.cu; any strides
``few4``        up to 4 rows of A, for which streaming B is the work, see gemm/sgemm/few.cu; K contiguous in A and B

None of it reaches the bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product
from ...driver.nvrtc import function_of
from ...driver.tensormap import encoder
from ..fp32 import Fp32Side, aligned_side, epilogue, grid, serves, sides

__all__ = ["FEW", "TILES", "BlockTile", "FewRows", "Sgemm"]


class BlockTile(NamedTuple):
    """A block's tile, its panel of K, a thread's part of it, blocks to a multiprocessor, and its relative speed."""

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    blocks: int
    speed: float


class FewRows(NamedTuple):
    """Lanes of a warp along m; rows and columns of a thread; warps, stages, panel of K."""

    lanes: int
    rows: int
    columns: int
    warps: int
    stages: int
    k: int = 128


# Speeds at 4096 x 4096 x 4096 on an H200.
TILES = {
    "128x128 k8": BlockTile(128, 128, 8, 8, 8, 2, 1.0),
    "64x128 k16": BlockTile(64, 128, 16, 8, 4, 2, 0.94),
    "64x64 k16": BlockTile(64, 64, 16, 8, 4, 4, 0.91),
    "32x64 k16": BlockTile(32, 64, 16, 4, 4, 4, 0.7),
    "32x32 k16": BlockTile(32, 32, 16, 4, 2, 4, 0.5),
}
FEW = {
    "few1": FewRows(1, 1, 1, 1, 5),
    "few2": FewRows(2, 1, 1, 2, 5),
    "few4": FewRows(2, 2, 1, 2, 5),
    "few8": FewRows(4, 2, 2, 2, 5),
    "few16": FewRows(8, 2, 2, 4, 4),
}
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else


class Sgemm(ProductFamily):
    """The family; see the text of this module."""

    name, home = "sgemm", "backends/cuda/gemm/sgemm"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Those for few rows first, then tiles by a model of their time."""
        fits = min((x.lanes * x.rows for x in FEW.values() if product.m <= x.lanes * x.rows), default=0)
        few = [name for name, x in FEW.items() if x.lanes * x.rows == fits]
        tiles = sorted(TILES, key=lambda name: _expected(product, TILES[name]))
        return tuple(name for name in (*few, *tiles) if self.supports(product, name))

    def supports(self, product: Product, config: str) -> bool:
        """Tiles take any strides; few rows want K contiguous and aligned in both operands."""
        if not serves(product, ("fma",), ("chain", "leaf")):
            return False
        if config in TILES:
            return True
        few = FEW.get(config)
        if few is None or product.m > few.lanes * few.rows:
            return False
        order = product.contract.order
        if order.kind == "leaf" and order.size % few.k:
            return False
        return all(_mappable(side, product) for side in sides(product))

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        if config in TILES:
            return _tiled(product, TILES[config], device)
        return _few(product, FEW[config], device)


def _expected(p: Product, tile: BlockTile) -> float:
    """Time in arbitrary units: waves of blocks, each as long as its tile is large and slow."""
    blocks = -(-p.m // tile.m) * -(-p.n // tile.n) * p.batch
    waves = -(-blocks // (MULTIPROCESSORS * tile.blocks))
    return waves * tile.blocks * tile.m * tile.n / tile.speed


def _mode(side: Fp32Side, p: Product) -> int:
    """How a tile's panels are loaded; the numbers of gemm/sgemm/sgemm.cu."""
    order = p.contract.order
    if aligned_side(side, p.align) and (order.kind == "chain" or order.size % 4 == 0):
        return 0
    if aligned_side(side, p.align, across=True) and side.rows % 4 == 0:
        return 1
    return 3 if abs(side.k) < abs(side.row) else 2


def _mappable(side: Fp32Side, p: Product) -> bool:
    """Whether the copy engine reads an operand as it lies."""
    row = side.row if side.rows > 1 else 4
    return aligned_side(side._replace(row=row), p.align) and 0 < row < 2**37 and 0 <= side.batch < 2**37


def _leaf(p: Product) -> int:
    return min(p.contract.order.size, p.k) if p.contract.order.kind == "leaf" else 0


def _tail(p: Product, leaf: int, types: int, *counts: int) -> list[Any]:
    values = [("i32", x) for x in (p.m, p.n, p.k, p.batch, *counts, leaf, types)]
    return [*values, ("f32", p.alpha), ("f32", p.beta)]


def _tiled(p: Product, tile: BlockTile, device: int) -> Launch:
    a, b = sides(p)
    leaf, (strides, types) = _leaf(p), epilogue(p)
    defines: dict[str, object] = {
        "BM": tile.m,
        "BN": tile.n,
        "BK": tile.k,
        "TM": tile.thread_m,
        "TN": tile.thread_n,
        "MIN_BLOCKS": 1 if leaf else tile.blocks,
        "MODE_A": _mode(a, p),
        "MODE_B": _mode(b, p),
        "LEAF": leaf > 0,
    }
    steps = [("i64", x) for x in (a.row, a.k, a.batch, b.row, b.k, b.batch)]
    blocks = -(-p.m // tile.m) * -(-p.n // tile.n)
    launch = function_of("gemm/sgemm/sgemm.cu", "sgemm", device, defines).bind(
        [*["ptr"] * 5, *steps, *strides, *_tail(p, leaf, types)],
        grid=grid(blocks, p.batch),
        block=(tile.m // tile.thread_m * (tile.n // tile.thread_n),),
        pdl=True,
    )

    def enqueue(at: Addresses, stream: int) -> None:
        launch(stream, *at[:5])

    # Parameters are (a, b, out, c, bias), the order of Addresses.
    return enqueue


def _few(p: Product, few: FewRows, device: int) -> Launch:
    rows, cols = few.lanes * few.rows, 32 // few.lanes * few.columns * few.warps
    leaf, (strides, types) = _leaf(p), epilogue(p)
    defines: dict[str, object] = {
        "LANES_M": few.lanes,
        "TM": few.rows,
        "TN": few.columns,
        "WARPS": few.warps,
        "STAGES": few.stages,
        "BK": few.k,
        "LEAF": leaf > 0,
    }
    a, b = sides(p)
    items = [p.batch if side.batch else 1 for side in (a, b)]
    maps = []
    for side, box, count in ((a, rows, items[0]), (b, cols, items[1])):
        row = side.row if side.rows > 1 else -(-p.k // 4) * 4
        sizes, steps = (count, side.rows, p.k), (side.batch or row * side.rows, row, 1)
        maps.append(encoder("float32", sizes=sizes, strides=steps, box=(1, box, 32), promotion=256))
    slab = (cols + max(rows, 8)) * 128
    launch = function_of("gemm/sgemm/few.cu", "sgemm_few", device, defines).bind(
        ["map", "map", "ptr", "ptr", "ptr", *strides, *_tail(p, leaf, types, *items)],
        grid=grid(-(-p.n // cols), p.batch),
        block=(32 * few.warps + 32,),
        shared=1024 + few.stages * few.k // 32 * slab,
        pdl=True,
    )
    map_a, map_b = maps

    def enqueue(at: Addresses, stream: int) -> None:
        launch(stream, map_a(at.a), map_b(at.b), at.out, at.c, at.bias)

    return enqueue
