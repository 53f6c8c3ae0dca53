"""Hopper's own instructions: a persistent, warp-specialised chain on wgmma, fed by the tensor copy engine.

A configuration is a text such as ``128x256x64 s4 c2x1``: rows, columns and K of a block's tile, stages of its ring and,
where given, its options:

``w``        (in front) the weights are the 64 rows of an instruction, the tokens its columns: tiles of 64 x 8 and up
``cMxN``     clusters of M x N blocks: blocks in a row of it share the first operand, blocks in a column the second
``pp``       two warpgroups own alternate tiles, so that one's epilogue hides behind the other's products
``oN``       N blocks to a multiprocessor
``gN``       groups of N tiles along the first operand, walked together for the sake of L2
``e``        weights are the first to leave L2, tokens the last

None of it reaches the bits: every element walks K in ascending blocks of 16 in one accumulator, or in leaves of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .....base.dtypes import ITEMSIZE
from .....planner.fingerprint import fingerprint
from .....problem.product import Addresses, Launch, Product, Strides
from .config import KINDS, OPERANDS, Config, Geometry, Side, geometry, serves
from .model import ranked, resident

if TYPE_CHECKING:
    from ...driver.tensormap import Encoder

__all__ = ["Hopper", "source"]


class Hopper:
    """The family; see the text of this module."""

    name = "hopper"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Configurations worth timing, the fastest by a model of this GPU first."""
        return tuple(str(c) for c in ranked(product)[:12])

    def supports(self, product: Product, config: str) -> bool:
        """Whether a configuration is legal: contract, types, layouts, shared memory, registers."""
        parsed = Config.parse(config)
        return parsed is not None and serves(product, parsed)

    def build(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        from ...driver.facts import device as facts

        parsed = Config.parse(config)
        seen = geometry(product, parsed) if parsed else None
        assert seen is not None, f"{config} does not serve {product}"
        return _bind(product, seen, device, facts(device).multiprocessors)

    def fingerprint(self) -> str:
        """Hash of the sources."""
        return fingerprint("backends/cuda/gemm/hopper")


def _instruction(operand: str, n: int, x_across: bool, y_across: bool) -> str:
    """The function `mma`: one wgmma of 64 x n x 16 on `n` / 2 accumulators; scale 0 starts from zero."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"static __device__ __forceinline__ void mma(float (&d)[{count}], unsigned long long x, unsigned long long y, "
        f'int scale) {{\n  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand}.{operand} {{{registers}}}, %{count}, %{count + 1}, "
        f'p, 1, 1, {int(x_across)}, {int(y_across)};\\n}}" : {outputs} : "l"(x), "l"(y), "r"(scale));\n}}\n'
    )


def _defines(p: Product, g: Geometry) -> dict[str, object]:
    c, leaf = g.config, p.contract.order.kind == "leaf"
    out_bytes = ITEMSIZE[p.dtype_out]
    return {
        "BN": c.cols,
        "KS": c.depth // 64,
        "STAGES": c.stages,
        "WARPGROUPS": c.warpgroups,
        "MW": c.blocks,
        "PINGPONG": c.pingpong,
        "CM": c.cm,
        "CN": c.cn,
        "X_MN": g.x.across,
        "Y_MN": g.y.across,
        "X_ROWS": g.x_rows,
        "COLUMNS": g.columns,
        "LEAF": leaf,
        "TOTALS": c.totals(leaf),
        "ACCUMULATE": p.accumulate,
        "EPILOGUE": p.alpha != 1 or p.dtype_bias is not None or (p.c is not None and not p.accumulate),
        "C_KIND": -1 if p.dtype_c is None else KINDS[p.dtype_c],
        "BIAS_KIND": -1 if p.dtype_bias is None else KINDS[p.dtype_bias],
        "OUT": KINDS[p.dtype_out],
        "VECTOR": g.out_step * out_bytes % 16 == 0 and (p.batch == 1 or p.out.batch * out_bytes % 16 == 0),
        "OCCUPANCY": c.occupancy,
        "PRODUCER_REGISTERS": 32 if c.warpgroups == 3 else 40,
        "CONSUMER_REGISTERS": 160 if c.warpgroups == 3 else 232,
        "X_POLICY": (1 if c.swapped else 2) * c.evict,
        "Y_POLICY": (2 if c.swapped else 1) * c.evict,
    }


def source(p: Product, g: Geometry) -> tuple[str, tuple[str, ...]]:
    """The text to compile for a product, and the compiler's options."""
    macros = tuple(f"-D{k}={int(v) if isinstance(v, bool) else v}" for k, v in _defines(p, g).items())
    text = _instruction(OPERANDS[p.dtype_a], g.config.cols, g.x.across, g.y.across)
    return text + '#include "gemm/hopper/hopper.cu"\n', ("-std=c++17", *macros)


def _encoder(p: Product, side: Side, box_rows: int, split: int) -> Encoder:
    """The map of an operand: items, rows, K; or items, K, rows where rows are contiguous."""
    from ...driver.tensormap import encoder

    lines = p.k if side.across else side.size
    inner = side.size if side.across else p.k
    items = p.batch if side.batch else 1
    box = (1, 64 // split, 64) if side.across else (1, box_rows // split, 64)
    strides = (side.batch or side.step * lines, side.step, 1)
    return encoder(p.dtype_a, sizes=(items, lines, inner), strides=strides, box=box, swizzle=128, promotion=256)


def _scalars(p: Product, g: Geometry) -> list[tuple[str, object]]:
    """Everything of a launch but the addresses, in the kernel's order."""
    c = g.config
    strides = p.c or Strides(0, 0)
    of_c, of_bias = (strides.row, strides.col), (0, p.bias_stride)
    if c.swapped:
        of_c, of_bias = of_c[::-1], of_bias[::-1]
    tiles = g.tiles()
    order = p.contract.order
    leaf = order.size // c.depth if order.kind == "leaf" else 0
    longs = (g.out_step, p.out.batch, *of_c, strides.batch, *of_bias)
    # All of X where it fits beside the rest in L2: Y is then read once.
    rows = 24 * 2**20 // (2 * p.k * c.rows * c.cm)
    group = min(c.group or max(8 // c.cm, rows), tiles[0])
    shared = int(g.x.batch > 0), int(g.y.batch > 0)
    ints = (g.x.size, g.y.size, -(-p.k // c.depth), leaf, *tiles, p.batch, group, *shared)
    return [*(("i64", v) for v in longs), *(("i32", v) for v in ints), ("f32", p.alpha), ("f32", p.beta)]


def _bind(p: Product, g: Geometry, device: int, multiprocessors: int) -> Launch:
    from ...driver.facts import device as facts
    from ...driver.kernel import load
    from ...driver.nvrtc import compile_text

    c = g.config
    text, options = source(p, g)
    kernel = load(compile_text(text, name="hopper_mma.cu", arch=facts(device).arch, options=options), "hopper", device)
    clusters = min(math.prod(g.tiles()) * p.batch, resident(c, multiprocessors))
    bound = kernel.bind(
        ["map", "map", "ptr", "ptr", "ptr", *_scalars(p, g)],
        grid=(clusters * c.cluster,),
        block=(c.threads,),
        shared=g.shared(p.contract.order.kind == "leaf"),
        cluster=(c.cluster,),
        pdl=True,
    )
    map_x, map_y = _encoder(p, g.x, g.x_rows, c.cn), _encoder(p, g.y, c.cols, c.cm)

    if c.swapped:

        def launch(at: Addresses, stream: int) -> None:
            bound(stream, map_x(at.b), map_y(at.a), at.out, at.c, at.bias)
    else:

        def launch(at: Addresses, stream: int) -> None:
            bound(stream, map_x(at.a), map_y(at.b), at.out, at.c, at.bias)

    return launch
