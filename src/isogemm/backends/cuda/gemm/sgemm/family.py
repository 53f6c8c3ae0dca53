"""float32 products by fused multiply-adds in ascending k: the CPU's own bits, at the rate of the CUDA cores.

Configurations
--------------
``128x128 k8``     tiles of 128 x 128 and panels of 8 of K through registers: gemm/sgemm/sgemm.cu
``32x64 k64 s4``   tiles of 32 x 64 and panels of 64 of K through a ring of 4 buffers: gemm/sgemm/ring.cu
``... copied``     either, of copies of the operands that it would load or copy in pieces of less than 16 bytes, because
                   of an odd K or odd strides (gemm/tf32/split.cu)

All take any strides; none of it reaches the bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product, Strides
from ...driver import facts
from ...driver.nvrtc import function_of
from ...driver.workspace import workspace
from ..fp32 import Fp32Side, aligned_side, epilogue, grid, serves, sides
from ..tf32.split import chain_cut, split_of


class BlockTile(NamedTuple):
    """A block's tile, its panel of K, a thread's part of the tile, and blocks to a multiprocessor.

    Then what `microseconds` counts with, in cycles for one of K: of a block alone on its multiprocessor, which waits,
    and of each of several, which share what bounds them; and how many times that where operands are not aligned.
    """

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    blocks: int
    alone: float
    each: float
    odd: float


class RingTile(NamedTuple):
    """As above; lanes of a warp along m, buffers of the ring, and steps of 4 of K that are read ahead."""

    m: int
    n: int
    thread_m: int
    thread_n: int
    lanes: int
    k: int
    stages: int
    ahead: int
    blocks: int
    alone: float
    each: float
    odd: float


# Cycles fitted to 150 products of all shapes on an H200, where the first by them takes 1.4 % more than the fastest.
TILES = {
    "128x128 k8": BlockTile(128, 128, 8, 8, 8, 2, 225, 186, 1.26),
    "64x128 k16": BlockTile(64, 128, 16, 8, 4, 2, 108, 97, 1.7),
    "64x64 k16": BlockTile(64, 64, 16, 8, 4, 4, 95, 51, 1.9),
    "128x64 k8": BlockTile(128, 64, 8, 8, 8, 4, 180, 96, 1.35),
}
RINGS = {
    "2x32 k64 s8": RingTile(2, 32, 1, 1, 2, 64, 8, 3, 3, 9.5, 4.5, 1.7),
    "4x16 k64 s8": RingTile(4, 16, 1, 1, 4, 64, 8, 3, 5, 8.6, 4.2, 1.3),
    "8x16 k64 s8": RingTile(8, 16, 2, 1, 4, 64, 8, 3, 4, 10, 5.3, 1.3),
    "8x32 k64 s4": RingTile(8, 32, 2, 2, 4, 64, 4, 1, 5, 14.6, 8.4, 1.4),
    "16x16 k64 s8": RingTile(16, 16, 2, 2, 8, 64, 8, 3, 3, 13.3, 7.8, 1.4),
    "16x32 k64 s4": RingTile(16, 32, 4, 2, 4, 64, 4, 1, 4, 20.8, 11.3, 1.3),
    "16x64 k64 s4": RingTile(16, 64, 4, 2, 4, 64, 4, 1, 2, 24.2, 19.2, 1.3),
    "32x16 k64 s4": RingTile(32, 16, 4, 2, 4, 64, 4, 1, 4, 23.7, 10.8, 1.4),
    "32x32 k64 s4": RingTile(32, 32, 4, 2, 4, 64, 4, 1, 3, 25, 19.2, 1.2),
    "32x48 k64 s3": RingTile(32, 48, 4, 2, 4, 64, 3, 1, 3, 36.7, 29.6, 1.15),
    "32x64 k32 s4": RingTile(32, 64, 4, 4, 4, 32, 4, 1, 4, 43.7, 32.2, 1.15),
    "32x64 k64 s4": RingTile(32, 64, 4, 4, 4, 64, 4, 1, 2, 42, 30.7, 1.2),
    "64x32 k32 s4": RingTile(64, 32, 4, 4, 4, 32, 4, 1, 4, 43.7, 31.9, 1.15),
    "64x64 k32 s4": RingTile(64, 64, 8, 4, 4, 32, 4, 1, 3, 68.5, 55, 1.15),
    "64x128 k32 s3": RingTile(64, 128, 8, 4, 4, 32, 3, 1, 2, 115, 105, 1.1),
}
COPIED = " copied"
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
CYCLES, BYTES, START = 1980, 3.6e6, 2.5  # of a microsecond: of a multiprocessor, from memory; microseconds of a launch


class Sgemm(ProductFamily):
    """The family; see the text of this module."""

    name, home = "sgemm", "backends/cuda/gemm/sgemm"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Tiles by a model of their time."""
        if not serves(product, ("fma",), ("chain", "leaf")):
            return ()
        names = [name for x in (*TILES, *RINGS) for name in (x, x + COPIED) if self.supports(product, name)]
        return tuple(sorted(names, key=lambda name: microseconds(product, name, MULTIPROCESSORS)))

    def supports(self, product: Product, config: str) -> bool:
        """Any strides."""
        if not serves(product, ("fma",), ("chain", "leaf")):
            return False
        if config.endswith(COPIED):
            chain = product.contract.order.kind == "chain" and product.align >= 16
            inner = config.removesuffix(COPIED)
            return chain and (inner in TILES or inner in RINGS) and any(_out_of_step(product, inner))
        return config in TILES or config in RINGS

    def microseconds(self, product: Product, config: str, device: int) -> float | None:
        """What a kernel is expected to take on a device; None where it does not serve the product."""
        if not self.supports(product, config):
            return None
        return microseconds(product, config, facts.device(device).multiprocessors)

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        if config.endswith(COPIED):
            return self._bind_copied(product, config, device)
        ring = RINGS.get(config)
        tile = ring or TILES[config]
        (a, b), order = sides(product), product.contract.order
        leaf = min(order.size, product.k) if order.kind == "leaf" else 0
        strides, types = epilogue(product)
        defines = _ringed(product, ring) if ring else dict(zip(("MODE_A", "MODE_B"), _modes(product), strict=True))
        defines |= {"BM": tile.m, "BN": tile.n, "BK": tile.k, "TM": tile.thread_m, "TN": tile.thread_n}
        defines |= {"MIN_BLOCKS": 1 if leaf else tile.blocks, "LEAF": leaf > 0}
        steps = [("i64", x) for x in (a.row, a.k, a.batch, b.row, b.k, b.batch)]
        sizes = [("i32", x) for x in (product.m, product.n, product.k, product.batch, leaf, types)]
        launch = function_of(f"gemm/sgemm/{'ring' if ring else 'sgemm'}.cu", "sgemm", device, defines).bind(
            [*["ptr"] * 5, *steps, *strides, *sizes, ("f32", product.alpha), ("f32", product.beta)],
            grid=grid(_blocks(product, tile), product.batch),
            block=(tile.m * tile.n // (tile.thread_m * tile.thread_n),),
            shared=(ring.m + ring.n) * ring.k * 4 * ring.stages if ring else 0,
            pdl=True,
        )

        def enqueue(at: Addresses, stream: int) -> None:
            launch(stream, *at[:5])

        # Parameters are (a, b, out, c, bias), the order of Addresses.
        return enqueue

    def _bind_copied(self, product: Product, config: str, device: int) -> Launch:
        """Copies of the operands that are out of step, and the product of them."""
        name = config.removesuffix(COPIED)
        inner, odd = _in_step(product, name)
        multiply, cut = self.bind(inner, name, device), chain_cut(product)
        a, b = (split_of(product, x, cut, 0, device) if o else None for x, o in zip(sides(product), odd, strict=True))
        first = a.nbytes if a else 0
        nbytes = first + (b.nbytes if b else 0)

        def enqueue(at: Addresses, stream: int) -> None:
            memory = workspace(nbytes, device)
            left = memory.data_ptr()
            if a:
                a.launch(stream, at.a, left)
                at = at._replace(a=left)
            if b:
                b.launch(stream, at.b, left + first)
                at = at._replace(b=left + first)
            multiply(at, stream)

        return enqueue


def _out_of_step(p: Product, config: str) -> tuple[bool, bool]:
    """Of A and B: whether a kernel has to load or copy less than 16 bytes at once."""
    if config in TILES:
        a, b = (mode > 1 for mode in _modes(p))
    else:
        a, b = (values < 4 for _, values in copies(p, RINGS[config]))
    return a, b


def _in_step(p: Product, config: str) -> tuple[Product, tuple[bool, bool]]:
    """The product of copies whose rows of K lie a multiple of 16 bytes apart, and which of A and B are copied."""
    a, b = _out_of_step(p, config)
    pitch = -(-p.k // 4) * 4
    x = Strides(pitch, 1, p.m * pitch if p.batch > 1 and p.a.batch else 0) if a else p.a
    y = Strides(1, pitch, p.n * pitch if p.batch > 1 and p.b.batch else 0) if b else p.b
    return replace(p, a=x, b=y), (a, b)


def _blocks(p: Product, tile: BlockTile | RingTile) -> int:
    return -(-p.m // tile.m) * -(-p.n // tile.n)


def microseconds(p: Product, config: str, multiprocessors: int) -> float:
    """Rounds of blocks, as many as fit at once, or what memory takes for the operands."""
    if config.endswith(COPIED):
        name = config.removesuffix(COPIED)
        inner, (a, b) = _in_step(p, name)
        copied = 8 * p.k * p.batch * (p.m * a + p.n * b)
        return microseconds(inner, name, multiprocessors) + START + copied / BYTES
    tile = RINGS.get(config) or TILES[config]
    odd = any(_out_of_step(p, config))
    rounds, rest = divmod(_blocks(p, tile) * p.batch, multiprocessors * tile.blocks)
    cycles = rounds * max(tile.alone, tile.blocks * tile.each)
    if rest:
        cycles += max(tile.alone, -(-rest // multiprocessors) * tile.each)
    nbytes = 4 * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    return START + max(p.k * cycles * (tile.odd if odd else 1) / CYCLES, nbytes / BYTES)


def _modes(p: Product) -> list[int]:
    """How each operand's panels are loaded; the numbers of gemm/sgemm/sgemm.cu."""
    return [_mode(side, p) for side in sides(p)]


def _mode(side: Fp32Side, p: Product) -> int:
    order = p.contract.order
    if aligned_side(side, p.align) and (order.kind == "chain" or order.size % 4 == 0):
        return 0
    if aligned_side(side, p.align, across=True) and side.rows % 4 == 0:
        return 1
    return 3 if abs(side.k) < abs(side.row) else 2


def _ringed(p: Product, tile: RingTile) -> dict[str, int]:
    """What gemm/sgemm/ring.cu wants to know beside the tile."""
    (deep_a, v_a), (deep_b, v_b) = copies(p, tile)
    made = {"DEEP_A": deep_a, "V_A": v_a, "DEEP_B": deep_b, "V_B": v_b}
    return {"LANES_M": tile.lanes, "STAGES": tile.stages, "AHEAD": tile.ahead, **made}


def copies(p: Product, tile: RingTile) -> list[tuple[bool, int]]:
    """Of A and B: whether a ring copies it along k, and how many values at once."""
    a, b = sides(p)
    return [_copied(a, p, tile.m), _copied(b, p, tile.n)]


def _copied(side: Fp32Side, p: Product, rows: int) -> tuple[bool, int]:
    order = p.contract.order
    deep = side.rows == 1 or abs(side.k) < abs(side.row)
    step, unit = (side.row if side.rows > 1 else 0, side.k) if deep else (side.k, side.row)
    cut = (order.size if order.kind == "leaf" else 0) if deep else rows
    values = next((v for v in (4, 2) if p.align >= 4 * v and not any(x % v for x in (step, side.batch, cut))), 1)
    return deep, values if unit == 1 else 1
