"""float32 products on Hopper's tensor cores: tf32:sm90 from rounded operands, tf32x3:sm90 from operands split in two.

A first kernel writes both operands as tf32 numbers into a workspace, K contiguous and aligned whatever their strides
(split.cu); the second one multiplies (tf32.cu). Leaves of a tree are items of their own, which a third kernel joins
(gemm/meet.cu).

A configuration is ``128x128 s3 c2 t``: the tile of a block, the stages of its ring and, where given, clusters of two
blocks that share B, and consumers that take turns. It does not reach the bits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product
from ...driver import facts
from ...driver.kernel import Bound, ints
from ...driver.nvrtc import function_of
from ...driver.tensormap import Encoder, encoder
from ...driver.wgmma import mma
from ...driver.workspace import workspace
from ..fp32 import Fp32Side, epilogue, serves, sides, types_of
from ..meet import meet_of, pitched
from .split import STEP, Cut, Split, chain_cut, split_of

ARITHMETICS = {"tf32:sm90": 1, "tf32x3:sm90": 3}
CONFIGS = {
    1: ("128x128 s6", "128x256 s4", "128x64 s8", "128x32 s8"),
    3: ("128x128 s3 t", "128x64 s4 t", "128x32 s5"),
}
ROWS = 128
SHARED = 227 * 1024
MULTIPROCESSORS = 132  # of an H200; ranks candidates, nothing else
COLUMNS = {8, 16, 32, 64, 128, 256}


def cut(p: Product) -> Cut:
    """Where leaves of K begin has to be where a row of shared memory does."""
    order = p.contract.order
    if order.kind == "chain":
        return chain_cut(p)
    tree = order.kind == "tree"
    block = p.contract.block
    leaf = block * -(-p.k // (order.size * block)) if tree else min(order.size, -(-p.k // block) * block)
    padded = -(-leaf // STEP) * STEP
    count = order.size if tree else -(-p.k // leaf)
    blocks = padded // STEP
    return Cut(
        leaf, padded, padded * count, blocks if tree else blocks * count, count if tree else 1, 0 if tree else blocks
    )


class Tf32(ProductFamily):
    """The family; see the text of this module."""

    name, home = "tf32", "backends/cuda/gemm/tf32"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Legal configurations, the fastest first by a model of their time: waves of tiles."""
        if product.contract.arithmetic not in ARITHMETICS:
            return ()
        names = CONFIGS[ARITHMETICS[product.contract.arithmetic]]
        legal = [name for name in names if self.supports(product, name)]
        return tuple(sorted(legal, key=lambda name: _expected(product, name)))

    def supports(self, product: Product, config: str) -> bool:
        """Any strides, epilogue, order and batch; a tile has to fit registers and shared memory."""
        parsed = _parse(config)
        if parsed is None or not serves(product, tuple(ARITHMETICS), ("chain", "leaf", "tree")):
            return False
        passes = ARITHMETICS[product.contract.arithmetic]
        held = (3 if passes == 3 else 1) + (product.contract.order.kind == "leaf")
        k = cut(product)
        items = product.batch * k.chunks
        columns, tiles = parsed.columns, _tiles(product, parsed) * items
        return (
            columns in COLUMNS
            and held * columns // 2 <= 192
            and columns >= 16 * parsed.cluster
            and parsed.stages >= 2
            and _ring(passes, parsed) <= SHARED
            and max(tiles, k.pitch, 2 * items) < 2**31
        )

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        parsed = _parse(config)
        assert parsed is not None
        return _bind(product, parsed, device)


class Tf32Config(NamedTuple):
    """A configuration, parsed."""

    columns: int
    stages: int
    cluster: int
    turns: int


def _parse(config: str) -> Tf32Config | None:
    match = re.fullmatch(r"128x(\d+) s(\d+)( c2)?( t)?", config)
    return (
        None if match is None else Tf32Config(int(match[1]), int(match[2]), 2 if match[3] else 1, 1 if match[4] else 0)
    )


def _tiles(p: Product, c: Tf32Config) -> int:
    """Blocks of one item, whole clusters of them."""
    return -(-p.m // (ROWS * c.cluster)) * c.cluster * -(-p.n // c.columns)


def _expected(p: Product, config: str) -> float:
    c = _parse(config)
    assert c is not None
    waves = -(-_tiles(p, c) * p.batch // MULTIPROCESSORS)
    return waves * (c.columns + 24)  # a tile's time: columns, and what every tile costs


def _ring(passes: int, c: Tf32Config) -> int:
    return 1024 + c.stages * (2 if passes == 3 else 1) * (ROWS + c.columns) * 128


def _part(p: Product, side: Fp32Side, k: Cut, parts: int, box: int, device: int) -> tuple[Split, Encoder]:
    """One operand in the workspace: its split, and the map of it there."""
    split = split_of(p, side, k, parts, device)
    shape = (parts * split.items, side.rows, k.pitch)
    strides = (side.rows * k.pitch, k.pitch, 1)
    return split, encoder("float32", sizes=shape, strides=strides, box=(1, box, STEP))


def _bind(p: Product, c: Tf32Config, device: int) -> Launch:
    k = cut(p)
    passes = ARITHMETICS[p.contract.arithmetic]
    (a, map_a), (b, map_b) = (
        _part(p, side, k, 2 if passes == 3 else 1, box, device)
        for side, box in zip(sides(p), (ROWS, c.columns // c.cluster), strict=True)
    )
    multiply = _product(p, k, c, (a.items, b.items), device)
    join = meet_of(p, k.chunks, device) if k.chunks > 1 else None
    nbytes = a.nbytes + b.nbytes + (4 * p.batch * k.chunks * p.m * pitched(p.n) if join else 0)

    def enqueue(at: Addresses, stream: int) -> None:
        memory = workspace(nbytes, device)
        left = memory.data_ptr()
        right = left + a.nbytes
        a.launch(stream, at.a, left)
        b.launch(stream, at.b, right)
        if join is None:
            multiply(stream, map_a(left), map_b(right), at.out, at.c, at.bias)
        else:
            leaves = right + b.nbytes
            multiply(stream, map_a(left), map_b(right), leaves, 0, 0)
            join(stream, leaves, at.out, at.c, at.bias)

    return enqueue


def _product(p: Product, k: Cut, c: Tf32Config, items: tuple[int, int], device: int) -> Bound:
    """The multiplication; of a tree, its leaves, one after the other."""
    passes = ARITHMETICS[p.contract.arithmetic]
    seen = replace(p.sums(p.batch * k.chunks, pitched(p.n)), align=128) if k.chunks > 1 else p
    defines = {
        "PASSES": passes,
        "BN": c.columns,
        "STAGES": c.stages,
        "CLUSTER": c.cluster,
        "TURNS": c.turns,
        "LEAF": int(k.leaf_blocks > 0),
        "TYPES": types_of(seen),
    }
    slots = facts.device(device).multiprocessors // c.cluster * c.cluster
    counts = ints(p.m, p.n, k.blocks, k.chunks, seen.batch, *items, k.leaf_blocks)
    return function_of("gemm/tf32/tf32.cu", "tf32", device, defines, before=mma("tf32", c.columns)).bind(
        ["map", "map", "ptr", "ptr", "ptr", *epilogue(seen), *counts, ("f32", seen.alpha), ("f32", seen.beta)],
        grid=(min(_tiles(p, c) * seen.batch, slots),),
        block=(384,),
        shared=_ring(passes, c),
        cluster=(c.cluster,),
        pdl=True,
    )
