"""Families over the Triton tile: "chain" on tensor cores and "ieee" in float32 fused multiply-adds.

They serve every product of their arithmetic: any strides, alignment, epilogue, order and batch, on any NVIDIA GPU
that Triton compiles for. So each is the plain kernel of its arithmetic, and, in the right configuration, the fastest
one there is for few rows.

Configurations
--------------
``w64 x16 k128 s5 n4 p8 e``: 64 columns of B (weights) as the first operand of the instruction and 16 rows of A (tokens)
as the second; with ``x`` before ``w`` the other way round. BLOCK_K 128, 5 stages, 4 warps. ``p`` launches the kernel
before its predecessor ends and prefetches 8 lines of each column of B into L2 until then; without it the launch is a
plain one. ``e`` marks B as first to leave L2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .....base.dtypes import ITEMSIZE, TRITON
from .....contract.spec import Contract
from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product, Strides
from ...driver import facts
from ...driver.triton_build import build
from ...driver.workspace import workspace
from ..model import Gpu, Tiling, gpu_of, joining, microseconds

MAX_ITEMS = 65535  # of a batch in one launch: the second dimension of a grid
LARGEST = 2**31 - 1024  # of an extent, and of K with a leaf: the kernel counts in 32 bits, up to a tile beyond it
TREE_TILE = (4, 256)
SHARED, WARPS = 227 * 1024, 64  # of a multiprocessor
# Of the model: bytes a cycle that a multiprocessor takes in, cycles of a stage, bytes a cycle that a tile stores, and
# cycles before it does.
INGEST, STAGE, STORE, EPILOGUE = 23.0, 333.0, 9.3, 4800.0
# Lines that are not aligned come by loads of 2 bytes a thread, through registers: cycles of one for its warp and for
# the multiprocessor, cycles that a stage waits for them, and how many values a thread holds, accumulators among them,
# before it spills, eightfold.
LOAD_WARP, LOAD, LOADED, HELD, SPILLED = 40.0, 6.5, 968.0, 180, 8
_PATTERN = re.compile(r"(?:w(\d+) x(\d+)|x(\d+) w(\d+)) k(\d+) s(\d+) n(\d+)(?: p(\d+))?( e)?")

CHAIN_CONFIGS: dict[int, tuple[str, ...]] = {
    8: (
        "w16 x8 k512 s4 n2 p4", "w16 x8 k256 s4 n1 p0", "w64 x8 k64 s5 n4 p0", "w64 x16 k64 s10 n4 p0",
        "w32 x8 k128 s5 n2 p0", "w32 x16 k512 s4 n2 p8", "w16 x8 k512 s3 n2 p4", "w16 x8 k256 s6 n1 p4",
        "w64 x16 k128 s5 n4 p0", "w32 x8 k256 s7 n4 p8", "w128 x16 k128 s3 n4", "w16 x8 k512 s4 n2 p0",
    ),
    16: (
        "w64 x16 k64 s10 n4 p0", "w64 x16 k128 s5 n4 p0", "w16 x16 k512 s3 n2 p4", "w64 x16 k128 s3 n4",
        "w32 x16 k512 s4 n2 p8", "w16 x16 k256 s3 n1 p4", "w32 x16 k512 s3 n2 p8", "w128 x16 k128 s4 n4 p4",
        "w64 x16 k128 s7 n4 p0", "w16 x16 k512 s3 n2 p0",
    ),
    32: (
        "w64 x32 k64 s9 n4 p0", "w32 x32 k512 s3 n4 p4", "w64 x32 k128 s3 n4", "w64 x32 k128 s4 n4 p0",
        "w32 x32 k512 s3 n4 p8", "w64 x32 k64 s4 n4",
    ),
    64: ("x64 w32 k256 s4 n4 p0", "w64 x64 k128 s5 n4 p0", "x64 w128 k128 s4 n4 p0", "w64 x64 k64 s4 n4 p0"),
    2**31: ("w128 x128 k64 s6 n8 p0", "w64 x64 k128 s4 n4 p0", "w128 x256 k64 s4 n8 p0", "x128 w64 k64 s4 n4"),
}  # fmt: skip
CHAIN_PLAIN = ("x64 w64 k32 s3 n4", "w64 x16 k64 s3 n4")
IEEE_CONFIGS: dict[int, tuple[str, ...]] = {
    16: ("w64 x16 k32 s4 n4", "w32 x16 k64 s4 n2", "w16 x16 k64 s4 n1"),
    2**31: ("x64 w64 k16 s3 n4", "x128 w64 k16 s3 n8", "w64 x32 k32 s3 n4"),
}
IEEE_PLAIN = ("x32 w32 k16 s2 n4",)


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration, parsed. `lines` is None without a dependent launch."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    swap: bool
    lines: int | None
    stream: bool

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, config: str) -> Tile | None:
        """None where the text is no configuration of this family."""
        match = _PATTERN.fullmatch(config)
        if match is None:
            return None
        w, x, x2, w2, k, s, n = (int(v) if v else 0 for v in match.groups()[:7])
        lines = None if match[8] is None else int(match[8])
        return cls(x or x2, w or w2, k, s, n, bool(w), lines, bool(match[9]))

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory that the stages take, at least."""
        return (self.block_m + self.block_n) * self.block_k * itemsize * self.stages


@dataclass(frozen=True)
class TileFamily(ProductFamily):
    """A family over `kernels.tile`; see the module."""

    name: str
    fma: bool
    by_rows: dict[int, tuple[str, ...]]
    plain: tuple[str, ...]
    home: str = "backends/cuda/gemm/tile"

    def configs(self, product: Product) -> tuple[str, ...]:
        """The likeliest first, the plain one last."""
        near = next(configs for rows, configs in self.by_rows.items() if product.m <= rows)
        return tuple(c for c in dict.fromkeys((*near, *self.plain)) if self.supports(product, c))

    def supports(self, product: Product, config: str) -> bool:
        """Strides, alignment and epilogue are free; the rest is the arithmetic, and room for the stages."""
        tile = Tile.parse(config)
        if tile is None or not self._computes(product) or not _countable(product):
            return False
        size = 4 if self.fma else 2
        if not _is_power_of_two(tile.block_m, tile.block_n, tile.block_k, tile.warps):
            return False
        if tile.lines and (product.b.row != 1 or product.k < 64 * tile.lines):
            return False
        return tile.shared(size) <= 225 * 1024 and tile.block_m * tile.block_n <= 256 * 32 * tile.warps

    def microseconds(self, product: Product, config: str, device: int | Gpu) -> float | None:
        """The time to expect on tensor cores, by the model of `isogemm.backends.cuda.gemm.model`."""
        tile = Tile.parse(config)
        if tile is None or self.fma:
            return None
        gpu, order = gpu_of(device), product.contract.order
        if order.kind == "tree":
            walks = product.sums(product.batch * order.size)
            walk = replace(walks, k=order.leaves(product.k, 16)[0][1], contract=Contract(product.contract.arithmetic))
            expected = self.microseconds(walk, config, device)
            return None if expected is None else expected + joining(product, order.size, gpu)
        tiles = -(-product.m // tile.block_m) * -(-product.n // tile.block_n) * product.batch
        resident = max(1, min(SHARED // (tile.shared(2) + 1024), WARPS // tile.warps))
        waves = -(-tiles // (gpu.multiprocessors * resident))
        beside = min(resident, -(-tiles // gpu.multiprocessors))
        lines = ((tile.block_m, product.a), (tile.block_n, product.b))
        wide = sum(count for count, x in lines if _wide(x))
        narrow = sum(count for count, x in lines if not _wide(x))
        held = (narrow * tile.block_k + tile.block_m * tile.block_n) / (32 * tile.warps)
        spilled = SPILLED if narrow and held > HELD else 1
        loads = narrow * 64 / 32 * spilled * max(LOAD_WARP / tile.warps, LOAD * beside)
        cut = Tiling(
            tiles=tiles,
            waves=waves,
            lines=tile.block_m + tile.block_n,
            work=wide * 128 / INGEST * beside + loads,
            stage=(STAGE + LOADED * (narrow > 0)) * 64 / tile.block_k,
            store=tile.block_m * tile.block_n * ITEMSIZE[product.dtype_out] / STORE + EPILOGUE,
            stores=waves,
        )
        return microseconds(product, cut, gpu)

    def _computes(self, product: Product) -> bool:
        arithmetic = product.contract.arithmetic
        if self.fma:
            return arithmetic == "fma"
        types = {product.dtype_a, product.dtype_b}
        return arithmetic.startswith("tensor_core:") and types in ({"bfloat16"}, {"float16"})

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile for the flags that the product needs, and bind everything but the addresses."""
        tile = Tile.parse(config)
        assert tile is not None
        if product.contract.order.kind == "tree":
            return _tree(product, tile, device, self.fma)
        return _bind(product, tile, device, fma=self.fma)


CHAIN = TileFamily("chain", False, CHAIN_CONFIGS, CHAIN_PLAIN)
IEEE = TileFamily("ieee", True, IEEE_CONFIGS, IEEE_PLAIN)


def _wide(x: Strides) -> bool:
    """Whether the compiler is told that lines start at multiples of 16 bytes; see `divisible`."""
    return all(step == 1 or step % 16 == 0 for step in (x.row, x.col))


def _countable(product: Product) -> bool:
    """Whether extents, and where the next leaf would begin, are numbers of 32 bits."""
    order = product.contract.order
    leaf = min(order.size, product.k) if order.kind == "leaf" else 0
    return max(product.m, product.n, product.k + leaf) <= LARGEST


def _is_power_of_two(*values: int) -> bool:
    return all(v > 0 and v & (v - 1) == 0 for v in values)


def unit(x: Strides) -> int:
    """Which stride is 1: that of the columns (0), of the rows (1), neither (2)."""
    return 0 if x.col == 1 else 1 if x.row == 1 else 2


def flags(product: Product, tile: Tile, fma: bool) -> dict[str, Any]:
    """Constants that every kernel over `kernels.tile` takes."""
    order = product.contract.order
    walks = (product.k, order.size) if order.kind == "leaf" and order.size < product.k else (product.k,)
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": 8,
        "SWAP": tile.swap,
        "A_UNIT": unit(product.a),
        "B_UNIT": unit(product.b),
        "OUT_UNIT": unit(product.out),
        "FMA": fma,
        "EVEN_K": all(length % tile.block_k == 0 for length in walks),
        "LEAVES": order.kind == "leaf",
        "START": product.accumulate,
        **_epilogue(product),
    }


def _values(product: Product, leaf: int) -> dict[str, int | float]:
    c = product.c or Strides(0, 0, 0)
    return {
        "m": product.m, "n": product.n, "k": product.k, "a_row": product.a.row, "a_col": product.a.col,
        "b_row": product.b.row, "b_col": product.b.col, "out_row": product.out.row, "out_col": product.out.col,
        "c_row": c.row, "c_col": c.col, "bias_step": product.bias_stride, "a_item": product.a.batch,
        "b_item": product.b.batch, "out_item": product.out.batch, "c_item": c.batch, "leaf": leaf,
        "alpha": product.alpha, "beta": product.beta,
    }  # fmt: skip


_I32 = {"m", "n", "k", "leaf"}
_F32 = {"alpha", "beta"}


def _signature(product: Product, pointers: dict[str, str], values: dict[str, int | float]) -> dict[str, str]:
    """Types of parameters: i32 for extents, fp32 for factors, i64 for everything that is multiplied into an address."""
    found = pointers | {"out": product.dtype_out, "c": product.dtype_c or "float32"}
    found |= {"bias": product.dtype_bias or "float32"}
    scalars = {name: "i32" if name in _I32 else "fp32" if name in _F32 else "i64" for name in values}
    return {name: f"*{TRITON[kind]}" for name, kind in found.items()} | scalars


def _epilogue(product: Product) -> dict[str, Any]:
    """Constants that say what follows the sum."""
    return {
        "ALPHA": product.alpha != 1,
        "BETA": 0 if product.beta == 0 else 1 if product.beta == 1 else 2,
        "BIAS": product.dtype_bias is not None,
    }


def divisible(values: dict[str, int | float]) -> Iterable[str]:
    """Names of integers that are multiples of 16, which the compiler turns into wide loads and stores."""
    return (name for name, v in values.items() if isinstance(v, int) and v % 16 == 0 and name != "m")


def _bind(product: Product, tile: Tile, device: int, *, fma: bool, split: int = 0, leaf: int = 0) -> Launch:
    """One launch; a batch beyond a grid's limit is cut into several."""
    from .chain import chain

    on = facts.device(device)
    pdl = tile.lines is not None and on.overlaps
    order = product.contract.order
    length = min(order.size, product.k) if order.kind == "leaf" else leaf
    values = _values(product, length)
    constants = flags(product, tile, fma) | {
        "SPLIT": split,
        "PDL": pdl,
        "PREFETCH": (tile.lines or 0) if pdl else 0,
        "STREAM": tile.stream,
    }
    if split:
        constants["LEAVES"] = False
        constants["EVEN_K"] = product.k % tile.block_k == 0 and leaf % tile.block_k == 0
    signature = _signature(product, {"a": product.dtype_a, "b": product.dtype_b}, values)
    hints = {*divisible(values), *(("a", "b", "out", "c", "bias") if product.align >= 16 else ())}
    built = build(
        chain, signature, constants, aligned=tuple(sorted(hints)), capability=on.capability,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl, enable_fp_fusion=True,
    )  # fmt: skip
    tiles = -(-product.m // tile.block_m) * -(-product.n // tile.block_n)
    items = product.batch * max(1, split)
    step = MAX_ITEMS - MAX_ITEMS % max(1, split)

    def part(count: int) -> Callable[..., None]:
        return built.bind(device, (tiles, count), values)

    if items <= step:
        run = part(items)

        def launch(at: Addresses, stream: int) -> None:
            run(stream, *at)

        return launch
    return _in_parts(product, items, step, max(1, split), part)


def _in_parts(
    product: Product, items: int, step: int, split: int, part: Callable[[int], Callable[..., None]]
) -> Launch:
    sizes = (
        ITEMSIZE[product.dtype_a] * product.a.batch,
        ITEMSIZE[product.dtype_b] * product.b.batch,
        ITEMSIZE[product.dtype_out] * product.out.batch * split,
        ITEMSIZE[product.dtype_c] * product.c.batch if product.c is not None and product.dtype_c else 0,
        0,
    )
    whole, rest = part(step), items % step
    last = part(rest) if rest else None

    def launch(at: Addresses, stream: int) -> None:
        for first in range(0, items, step):
            run = whole if items - first >= step or last is None else last
            run(stream, *(x + first // split * size for x, size in zip(at, sizes, strict=True)))

    return launch


def _tree(product: Product, tile: Tile, device: int, fma: bool) -> Launch:
    """Leaves as items of a float32 workspace, one launch; a second one meets them and finishes."""
    leaves = product.contract.order.size
    block = product.contract.block
    length = block * -(-product.k // (leaves * block))
    walk = _bind(product.sums(product.batch), tile, device, fma=fma, split=leaves, leaf=length)
    meet = _meet(product, device)
    nbytes = 4 * product.m * product.n * leaves * product.batch

    def launch(at: Addresses, stream: int) -> None:
        memory = workspace(nbytes, device)
        where = memory.data_ptr()
        walk(Addresses(at.a, at.b, where), stream)
        meet(where, at, stream)

    return launch


def _meet(product: Product, device: int) -> Callable[[int, Addresses, int], None]:
    from .tree import tree

    c = product.c or Strides(0, 0, 0)
    values: dict[str, int | float] = {
        "m": product.m, "n": product.n, "out_row": product.out.row, "out_col": product.out.col,
        "out_item": product.out.batch, "c_row": c.row, "c_col": c.col, "c_item": c.batch,
        "bias_step": product.bias_stride, "alpha": product.alpha, "beta": product.beta,
    }  # fmt: skip
    constants = {"LEAVES": product.contract.order.size, "BLOCK_M": TREE_TILE[0], "BLOCK_N": TREE_TILE[1]}
    signature = _signature(product, {"sums": "float32"}, values)
    built = build(
        tree, signature, constants | _epilogue(product), capability=facts.device(device).capability, num_warps=4
    )
    tiles = -(-product.m // TREE_TILE[0]) * -(-product.n // TREE_TILE[1])
    sizes = (ITEMSIZE[product.dtype_out] * product.out.batch, ITEMSIZE[product.dtype_c or "float32"] * c.batch)
    step_sums = 4 * product.m * product.n * product.contract.order.size
    counts = [min(MAX_ITEMS, product.batch - first) for first in range(0, product.batch, MAX_ITEMS)]
    runs = [built.bind(device, (tiles, count), values) for count in counts]

    def launch(sums: int, at: Addresses, stream: int) -> None:
        for i, run in enumerate(runs):
            first = i * MAX_ITEMS
            run(stream, sums + first * step_sums, at.out + first * sizes[0], at.c + first * sizes[1], at.bias)

    return launch
