"""Hopper's own instructions: a persistent, warp-specialised chain on wgmma, fed by the tensor copy engine.

A configuration is a text such as ``128x256x64 s4 c2x1``: rows, columns and K of a block's tile, stages of its ring and,
where given, its options (16 or 32 rows are part of an instruction's 64: more tiles where N is small and K long):

``w``        (in front) the weights are the 64 rows of an instruction, the tokens its columns: tiles of 64 x 8 and up
``cMxN``     clusters of M x N blocks: blocks in a row of it share the first operand, blocks in a column the second
``pp``       two warpgroups own alternate tiles, so that one's epilogue hides behind the other's products
``oN``       N blocks to a multiprocessor
``gN``       groups of N tiles along the first operand, walked together for the sake of L2
``e``        weights are the first to leave L2, tokens the last

None of it reaches the bits: every element walks K in ascending blocks of 16 in one accumulator, or in leaves of them,
which are added in ascending order or meet in a tree.
"""

from __future__ import annotations

import math

from .....base.dtypes import CODE, ITEMSIZE
from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product, Strides
from ...driver import facts
from ...driver.nvrtc import function_of
from ...driver.tensormap import Encoder, encoder
from ...driver.wgmma import mma
from ...driver.workspace import workspace
from ..model import Gpu, gpu_of
from .config import (
    OPERANDS,
    Geometry,
    HopperConfig,
    HopperSide,
    geometry,
    group_of,
    has_totals,
    late,
    leaf_of,
    levels_of,
    quads_of,
    resident,
    serves,
)
from .model import expected, ranked
from .palette import PALETTE


class Hopper(ProductFamily):
    """The family; see the text of this module."""

    name, home = "hopper", "backends/cuda/gemm/hopper"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Configurations worth timing, the fastest by a model of this GPU first."""
        return tuple(str(c) for c in ranked(product)[:12])

    def supports(self, product: Product, config: str) -> bool:
        """Whether a configuration is legal: contract, types, layouts, shared memory, registers."""
        parsed = HopperConfig.parse(config)
        return parsed is not None and serves(product, parsed)

    def palette(self, product: Product) -> tuple[str, ...]:
        """A few for all products; see `isogemm.backends.cuda.gemm.hopper.palette`."""
        return tuple(c for c in PALETTE if self.supports(product, c))

    def microseconds(self, product: Product, config: str, device: int | Gpu) -> float | None:
        """The time to expect, by the model of `isogemm.backends.cuda.gemm.model`."""
        parsed = HopperConfig.parse(config)
        return None if parsed is None else expected(product, parsed, gpu_of(device))

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        parsed = HopperConfig.parse(config)
        seen = geometry(product, parsed) if parsed else None
        assert seen is not None, f"{config} does not serve {product}"
        return _bind(product, seen, device)


def epilogue_defines(p: Product, g: Geometry) -> dict[str, object]:
    """Macros of include/hopper_epilogue.cu."""
    out_bytes = ITEMSIZE[p.dtype_out]
    return {
        "COLUMNS": g.columns,
        "ACCUMULATE": p.accumulate,
        "EPILOGUE": p.alpha != 1 or p.dtype_bias is not None or (p.c is not None and not p.accumulate),
        "C_KIND": -1 if p.dtype_c is None else CODE[p.dtype_c],
        "BIAS_KIND": -1 if p.dtype_bias is None else CODE[p.dtype_bias],
        "BIAS_ROWS": g.config.swapped,
        "OUT": CODE[p.dtype_out],
        "VECTOR": g.out_step * out_bytes % 16 == 0 and (p.batch == 1 or p.out.batch * out_bytes % 16 == 0),
    }


def _defines(p: Product, g: Geometry) -> dict[str, object]:
    c = g.config
    return {
        **epilogue_defines(p, g),
        "BN": c.cols,
        "KS": c.depth // 64,
        "STAGES": c.stages,
        "WARPGROUPS": c.warpgroups,
        "MW": c.blocks,
        "TILE_ROWS": c.rows,
        "PINGPONG": c.pingpong,
        "CM": c.cm,
        "CN": c.cn,
        "X_MN": g.x.across,
        "Y_MN": g.y.across,
        "X_ROWS": g.x_rows,
        "X_WHOLE": g.chunks(p)[0] > 0,
        "Y_WHOLE": g.chunks(p)[1] > 0,
        "LEAF": has_totals(p),
        "TOTALS": c.totals * has_totals(p),
        "QUADS": quads_of(p),
        "LEVELS": levels_of(p),
        "INSIDE": g.inside(p),
        "FIRST": "-0.0f" if p.contract.order.kind == "tree" else "0.0f",
        "OCCUPANCY": c.occupancy,
        "PRODUCER_REGISTERS": 32 if c.warpgroups == 3 else 40,
        "CONSUMER_REGISTERS": 160 if c.warpgroups == 3 else 232,
        "X_POLICY": (1 if c.swapped else 2) * c.evict,
        "Y_POLICY": (2 if c.swapped else 1) * c.evict,
    }


def source(p: Product, g: Geometry) -> tuple[str, dict[str, object]]:
    """What selects the compiled code: the instruction's text, and the macros."""
    return mma(OPERANDS[p.dtype_a], g.config.cols, x_across=g.x.across, y_across=g.y.across), _defines(p, g)


def encoder_of(p: Product, side: HopperSide, box_rows: int, split: int, chunks: int = 0, line: int = 64) -> Encoder:
    """The map of an operand: items, rows, K; or items, K, rows where rows are contiguous, `line` of them.

    A box is one of `split` parts of 64 of K, or so many chunks of 64 of K. For those K, where it is contiguous, is two
    axes: chunks, rows, 64 of K. That lines lie further apart than chunks is no matter (driver 580).
    """
    if chunks and not side.across:
        sizes, strides, box = (p.k // 64, side.size, 64), (64, side.step, 1), (chunks, box_rows, 64)
        return encoder(p.dtype_a, sizes=sizes, strides=strides, box=box, swizzle=128)
    lines = p.k if side.across else side.size
    inner = side.size if side.across else p.k
    items = p.batch if side.batch else 1
    box = (1, 64 * chunks or 64 // split, line) if side.across else (1, box_rows // split, 64)
    strides = (side.batch or side.step * lines, side.step, 1)
    return encoder(p.dtype_a, sizes=(items, lines, inner), strides=strides, box=box, swizzle=2 * box[-1])


def _scalars(p: Product, g: Geometry, late: bool) -> list[tuple[str, object]]:
    """Everything of a launch but the addresses, in the kernel's order."""
    c = g.config
    strides = p.c or Strides(0, 0)
    of_c = (strides.col, strides.row) if c.swapped else (strides.row, strides.col)
    tiles = g.tiles()
    longs = (g.out_step, p.out.batch, *of_c, strides.batch, p.bias_stride)
    shared = int(g.x.batch > 0), int(g.y.batch > 0)
    ints = (
        g.x.size,
        g.y.size,
        -(-p.k // c.depth),
        leaf_of(p) // c.depth,
        *tiles,
        p.batch,
        group_of(p, g),
        *shared,
        int(late),
    )
    return [*(("i64", v) for v in longs), *(("i32", v) for v in ints), ("f32", p.alpha), ("f32", p.beta)]


def _bind(p: Product, g: Geometry, device: int) -> Launch:
    c = g.config
    instruction, defines = source(p, g)
    kernel = function_of("gemm/hopper/hopper.cu", "hopper", device, defines, before=instruction)
    most = facts.device(device).multiprocessors
    clusters = min(math.prod(g.tiles()) * p.batch, resident(c, most))
    blocks = clusters * c.cluster
    waiting = (levels_of(p) - g.inside(p)) * blocks * c.sums  # bytes
    bound = kernel.bind(
        ["map", "map", "ptr", "ptr", "ptr", *["ptr"] * (waiting > 0), *_scalars(p, g, late(c, blocks, most))],
        grid=(blocks,),
        block=(c.threads,),
        shared=g.shared(p),
        cluster=(c.cluster,),
        pdl=True,
    )
    in_x, in_y = g.chunks(p)
    map_x, map_y = encoder_of(p, g.x, g.x_rows, c.cn, in_x, g.x_line), encoder_of(p, g.y, c.cols, c.cm, in_y)

    if waiting:

        def launch(at: Addresses, stream: int) -> None:
            x, y = (at.b, at.a) if c.swapped else (at.a, at.b)
            memory = workspace(waiting, device)
            bound(stream, map_x(x), map_y(y), at.out, at.c, at.bias, memory.data_ptr())
    elif c.swapped:

        def launch(at: Addresses, stream: int) -> None:
            bound(stream, map_x(at.b), map_y(at.a), at.out, at.c, at.bias)
    else:

        def launch(at: Addresses, stream: int) -> None:
            bound(stream, map_x(at.a), map_y(at.b), at.out, at.c, at.bias)

    return launch
