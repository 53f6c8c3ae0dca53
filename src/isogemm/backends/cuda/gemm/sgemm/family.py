"""float32 products by fused multiply-adds in ascending k: the CPU's own bits, at the rate of the CUDA cores.

Configurations
--------------
``128x128 k8``     tiles of 128 x 128 and panels of 8 of K through registers: gemm/sgemm/sgemm.cu
``32x64 k64 s3``   tiles of 32 x 64 and panels of 64 of K through a ring of 3 buffers: gemm/sgemm/ring.cu
``... sk``         either, whose blocks have even shares of all tiles (stream-K): of a tile that two share one walks the
                   beginning of K, and the other goes on from its sums, so that none is idle in a last round
``... copied``     either, of copies of the operands that it would load or copy in pieces of less than 16 bytes, because
                   of an odd K or odd strides (gemm/tf32/split.cu)

The copy engine fills rings where it can, and takes no lines that lie in one place or backwards; else all take any
strides. None of it reaches the bits.
"""

from __future__ import annotations

import math

from .....planner.trials import ProductFamily
from .....problem.product import Addresses, Launch, Product
from ...driver import facts
from ...driver.nvrtc import function_of
from ...driver.tensormap import Encoder, encoder
from ...driver.workspace import workspace
from ..fp32 import Fp32Side, epilogue, grid, serves, sides, types_of
from ..model import Gpu, gpu_of
from ..tf32.split import Cut, split_of
from .model import MULTIPROCESSORS, PALETTE, microseconds
from .tiles import (
    CONFIGS,
    LINE,
    RingTile,
    SgemmConfig,
    apart,
    blocks_of,
    boxed,
    copiers_of,
    copies,
    in_step,
    loads,
    out_of_step,
    pitch_of,
    shares_of,
    sure_of,
)


class Sgemm(ProductFamily):
    """The family; see the text of this module."""

    name, home = "sgemm", "backends/cuda/gemm/sgemm"

    def configs(self, product: Product) -> tuple[str, ...]:
        """Tiles by a model of their time."""
        if not _serves(product):
            return ()
        found = [config for config in CONFIGS if _fits(product, config)]
        return tuple(map(str, sorted(found, key=lambda config: microseconds(product, config, MULTIPROCESSORS))))

    def supports(self, product: Product, config: str) -> bool:
        """Any strides that the tile can be filled from."""
        parsed = SgemmConfig.parse(config)
        return parsed is not None and _serves(product) and _fits(product, parsed)

    def palette(self, product: Product) -> tuple[str, ...]:
        """A few for all products."""
        return tuple(config for config in PALETTE if self.supports(product, config))

    def microseconds(self, product: Product, config: str, device: int | Gpu) -> float | None:
        """What a kernel is expected to take on a device; None where it does not serve the product."""
        parsed = SgemmConfig.parse(config)
        if parsed is None or not self.supports(product, config):
            return None
        return microseconds(product, parsed, gpu_of(device).multiprocessors)

    def bind(self, product: Product, config: str, device: int) -> Launch:
        """Compile and bind."""
        parsed = SgemmConfig.parse(config)
        assert parsed is not None, f"{config} does not serve {product}"
        return _bind_copied(product, parsed, device) if parsed.copied else _bind(product, parsed, device)


def _serves(p: Product) -> bool:
    """Leaves begin where 4 values can be loaded at once: a verdict is on code that does so, whatever a leaf's size."""
    order = p.contract.order
    return serves(p, ("fma",), ("chain", "leaf")) and (order.kind == "chain" or order.size % 4 == 0)


def _fits(p: Product, config: SgemmConfig) -> bool:
    """Whether a configuration serves a product, and is another kernel there than one without its options."""
    chain = p.contract.order.kind == "chain"
    if config.copied and not (chain and p.align >= 16 and any(out_of_step(p, config.tile))):
        return False
    tile = config.sizes
    seen = in_step(p, config.tile)[0] if config.copied else p
    if isinstance(tile, RingTile) and boxed(seen, tile) and not apart(seen):
        return False
    if not config.shared:
        return True
    shares = shares_of(p, tile, MULTIPROCESSORS)
    counted = shares.columns * -(-p.k // tile.k) < 2**31  # panels, by the kernel
    return chain and counted and shares.uneven


def _bind(p: Product, config: SgemmConfig, device: int) -> Launch:
    tile, multiprocessors = config.sizes, facts.device(device).multiprocessors
    ring = tile if isinstance(tile, RingTile) else None
    (a, b), order = sides(p), p.contract.order
    leaf = min(order.size, p.k) if order.kind == "leaf" else 0
    shares = shares_of(p, tile, multiprocessors) if config.shared else None
    defines = _ringed(p, ring) if ring else _loading(p)
    defines |= {"SHARED": shares is not None}
    defines |= {"BM": tile.m, "BN": tile.n, "BK": tile.k, "TM": tile.thread_m, "TN": tile.thread_n}
    defines |= {"MIN_BLOCKS": 1 if leaf else sure_of(p, tile), "LEAF": leaf > 0, "TYPES": types_of(p)}
    steps = [("i64", x) for x in (a.row, a.k, a.batch, b.row, b.k, b.batch)]
    sizes = [("i32", x) for x in (p.m, p.n, p.k, p.batch, leaf)]
    kernel = function_of(f"gemm/sgemm/{'ring' if ring else 'sgemm'}.cu", "sgemm", device, defines)
    shared = (ring.m + ring.n) * ring.k * 4 * ring.stages if ring else 0
    blocks = (shares.blocks, 1, 1) if shares else grid(blocks_of(p, tile), p.batch)
    spread = -(-math.prod(blocks) // multiprocessors)
    if spread < tile.blocks:
        shared = max(shared, kernel.shared_of(spread))
    boxes = boxes_of(p, ring) if ring and boxed(p, ring) else None
    operands = ["map" if boxes else "ptr"] * 2
    memory = ["ptr", "ptr"] if shares else [("ptr", 0), ("ptr", 0)]  # of sums, of flags
    scalars = [*steps, *epilogue(p), *sizes, ("f32", p.alpha), ("f32", p.beta)]
    launch = kernel.bind(
        [*operands, *["ptr"] * 3, *scalars, *memory, ("i32", shares.size if shares else 0)],
        grid=blocks,
        block=(tile.m * tile.n // (tile.thread_m * tile.thread_n) + 32 * int(defines.get("COPIERS", 0)),),
        shared=shared,
        pdl=True,
    )

    def first(at: Addresses) -> tuple[int | bytes, ...]:
        """A kernel's first parameters, which have the order of Addresses."""
        return (boxes[0](at.a), boxes[1](at.b), *at[2:5]) if boxes else at[:5]

    if shares:
        flags = -(-shares.blocks // 128) * 512  # bytes
        nbytes = flags + shares.blocks * tile.m * tile.n * 4

        def enqueue(at: Addresses, stream: int) -> None:
            sums = workspace(nbytes, device)
            sums[:flags].zero_()
            launch(stream, *first(at), sums.data_ptr() + flags, sums.data_ptr())
    else:

        def enqueue(at: Addresses, stream: int) -> None:
            launch(stream, *first(at))

    return enqueue


def _bind_copied(p: Product, config: SgemmConfig, device: int) -> Launch:
    """Copies of the operands that are out of step, and the product of them."""
    inner, odd = in_step(p, config.tile)
    multiply, pitch = _bind(inner, config._replace(copied=False), device), pitch_of(p)
    cut = Cut(leaf=pitch, padded=pitch, pitch=pitch, blocks=pitch // LINE, chunks=1, leaf_blocks=0)
    a, b = (split_of(p, x, cut, 0, device) if o else None for x, o in zip(sides(p), odd, strict=True))
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


def _loading(p: Product) -> dict[str, int]:
    """What gemm/sgemm/sgemm.cu wants to know beside the tile."""
    (mode_a, v_a), (mode_b, v_b) = loads(p)
    return {"MODE_A": mode_a, "V_A": v_a, "MODE_B": mode_b, "V_B": v_b}


def _ringed(p: Product, tile: RingTile) -> dict[str, int]:
    """What gemm/sgemm/ring.cu wants to know beside the tile."""
    (deep_a, v_a), (deep_b, v_b) = copies(p, tile)
    made = {"LANES_M": tile.lanes, "STAGES": tile.stages, "AHEAD": tile.ahead}
    made |= {"BOXES": boxed(p, tile), "COPIERS": copiers_of(p, tile)}
    return made | {"DEEP_A": deep_a, "V_A": v_a, "DEEP_B": deep_b, "V_B": v_b}


def boxes_of(p: Product, tile: RingTile) -> list[Encoder]:
    """Maps of A and B, whose lines are of K or, where those are contiguous, of rows."""
    return [
        _boxed(p, side, deep, rows, tile.k)
        for side, (deep, _), rows in zip(sides(p), copies(p, tile), (tile.m, tile.n), strict=True)
    ]


def _boxed(p: Product, side: Fp32Side, deep: bool, rows: int, depth: int) -> Encoder:
    line = side.k if not deep else side.row if side.rows > 1 else -(-p.k // 4) * 4
    lines, length = (side.rows, p.k) if deep else (p.k, side.rows)
    return encoder(
        "float32",
        sizes=(p.batch if side.batch else 1, lines, length),
        strides=(side.batch or line * lines, line, 1),
        box=(1, rows, LINE) if deep else (1, depth, rows),
        swizzle=4 * LINE if deep else 0,
    )
