"""float32 products by fused multiply-adds in ascending k: the CPU's own bits, at the rate of the CUDA cores.

Configurations
--------------
``128x128 k8``     tiles of 128 x 128 and panels of 8 of K through registers: gemm/sgemm/sgemm.cu
``32x64 k64 s3``   tiles of 32 x 64 and panels of 64 of K through a ring of 3 buffers: gemm/sgemm/ring.cu
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
from ..model import together
from ..tf32.split import chain_cut, split_of


class BlockTile(NamedTuple):
    """A block's tile, its panel of K, a thread's part of the tile, and blocks to a multiprocessor.

    Then what `microseconds` counts with, in cycles for one of K: of a block alone on its multiprocessor, which waits,
    and of each of several, which share what bounds them.
    """

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    blocks: int
    alone: float
    each: float


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


# Cycles fitted to timings of 32 products, most of them slow ones, on an H200: docs/design/0011-cost-model.md.
TILES = {
    "128x128 k8": BlockTile(128, 128, 8, 8, 8, 2, 200, 167),
    "64x128 k8": BlockTile(64, 128, 8, 8, 8, 3, 150, 84.7),
    "64x64 k16": BlockTile(64, 64, 16, 8, 4, 4, 101, 44.4),
}
RINGS = {
    "2x16 k128 s5": RingTile(2, 16, 1, 1, 2, 128, 5, 3, 4, 4.3, 2.66),
    "4x8 k128 s6": RingTile(4, 8, 1, 1, 4, 128, 6, 3, 6, 4.6, 1.92),
    "4x16 k64 s8": RingTile(4, 16, 1, 1, 4, 64, 8, 3, 5, 5.6, 3.2),
    "8x8 k128 s5": RingTile(8, 8, 2, 1, 4, 128, 5, 3, 5, 6.2, 2.3),
    "8x16 k64 s8": RingTile(8, 16, 2, 1, 4, 64, 8, 3, 4, 10.5, 3.4),
    "8x32 k64 s4": RingTile(8, 32, 2, 2, 4, 64, 4, 1, 5, 13, 6.5),
    "16x32 k64 s4": RingTile(16, 32, 2, 2, 8, 64, 4, 1, 3, 14.8, 9),
    "32x12 k64 s6": RingTile(32, 12, 4, 1, 8, 64, 6, 3, 3, 9.4, 9.2),
    "32x32 k64 s4": RingTile(32, 32, 4, 2, 8, 64, 4, 1, 3, 16.4, 15.6),
    "32x64 k64 s3": RingTile(32, 64, 4, 4, 4, 64, 3, 1, 3, 36.6, 26.4),
    "48x64 k32 s4": RingTile(48, 64, 6, 4, 8, 32, 4, 1, 3, 45.1, 39.5),
    "56x64 k32 s4": RingTile(56, 64, 7, 4, 8, 32, 4, 1, 3, 47.7, 46.3),
}
COPIED = " copied"
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
CYCLES, BYTES = 1980, 3.9e6  # of a microsecond: of a multiprocessor, from memory
START, ROUND = 3.5, 1.0  # microseconds of a launch, and of filling and storing a round of tiles
# Times as long: a ring's copies of 4 bytes; single loads of tiles along rows, and along K; copies of such operands.
RING_ODD, ACROSS, ALONG, COPY_ALONG = 1.2, 1.08, 2.0, 1.3


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
        copiers = int(defines.get("COPIERS", 0))
        fewer = copiers > 1 and tile.blocks < 4  # registers, of wide tiles, for the second warp that copies
        defines |= {"MIN_BLOCKS": 1 if leaf else tile.blocks - fewer, "LEAF": leaf > 0}
        steps = [("i64", x) for x in (a.row, a.k, a.batch, b.row, b.k, b.batch)]
        sizes = [("i32", x) for x in (product.m, product.n, product.k, product.batch, leaf, types)]
        launch = function_of(f"gemm/sgemm/{'ring' if ring else 'sgemm'}.cu", "sgemm", device, defines).bind(
            [*["ptr"] * 5, *steps, *strides, *sizes, ("f32", product.alpha), ("f32", product.beta)],
            grid=grid(_blocks(product, tile), product.batch),
            block=(tile.m * tile.n // (tile.thread_m * tile.thread_n) + 32 * copiers,),
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
        slower = COPY_ALONG if name in TILES and max(_modes(p)) == 3 else 1.0
        return slower * microseconds(inner, name, multiprocessors) + START + copied / BYTES
    tile = RINGS.get(config) or TILES[config]
    rounds, rest = divmod(_blocks(p, tile) * p.batch, multiprocessors * tile.blocks)
    cycles = rounds * together(tile.alone, tile.blocks * tile.each)
    if rest:
        cycles += together(tile.alone, -(-rest // multiprocessors) * tile.each)
    nbytes = 4 * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    fixed = START + ROUND * (rounds + (rest > 0))
    return fixed + together(p.k * cycles * _slower(p, config) / CYCLES, nbytes / BYTES)


def _slower(p: Product, config: str) -> float:
    """How many times as long the walk takes where operands are out of step."""
    if config in RINGS:
        return RING_ODD if any(_out_of_step(p, config)) else 1.0
    return {2: ACROSS, 3: ALONG}.get(max(_modes(p)), 1.0)


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
    copiers = 1 if min(v_a, v_b) == 4 else 2
    made = {"COPIERS": copiers, "DEEP_A": deep_a, "V_A": v_a, "DEEP_B": deep_b, "V_B": v_b}
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
