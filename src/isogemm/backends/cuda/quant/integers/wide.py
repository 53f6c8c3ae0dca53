"""Codes of activations times quantized weights for many rows of x: ``int32/chain`` by wgmma on float16.

Codes are integers that float16 holds, and float32 accumulators hold their sums exactly: quant/integers/wide.cu. The
kernel for codes of x is one of its own, quant/integers/codes_wide.cu. No configuration reaches the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..layout import ROWS, STEP, Layout, macros
from ..many import instruction
from ..operands import Tail, compiled
from .activations import FLOAT, PAIRS, SPAN, WARPS, Places, reading, sums_kind

if TYPE_CHECKING:
    from ...driver.kernel import Bound, Parameter

__all__ = ["Wide", "activations", "bind", "config", "legal", "places"]

SHARED = 232448 - 1024  # bytes of dynamic shared memory that a block may have, less the barriers
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160), 4: (24, 112)}  # of the producer and of consumers, by warpgroups
# Measured on an H200, by warpgroups: us to 64 of K of a wave of tiles, and of each row of x in it. True: super-blocks.
COSTS = {
    False: {1: (0.10, 0.0035), 2: (0.17, 0.0051), 3: (0.18, 0.0074), 4: (0.20, 0.0106)},
    True: {1: (0.16, 0.0018), 2: (0.20, 0.0027), 3: (0.26, 0.0040), 4: (0.30, 0.0060)},
}
WAVE = 1.0  # us of a wave besides
NONE = ("Q5_K", "Q6_K")  # products s q too large for sums over much of K: quant_int.Many
Launch = Callable[..., None]


class Wide(NamedTuple):
    """How quant/integers/wide.cu shares out rows.

    Attributes
    ----------
    warpgroups : int
        Consumers, each with 64 rows of W.
    cols : int
        Rows of x of a tile.
    stages : int
        Of the ring, each with 64 of K.
    """

    warpgroups: int
    cols: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of W of a tile."""
        return 64 * self.warpgroups

    def pieces(self, lay: Layout) -> dict[str, int]:
        """How consumers cut their work, as far as registers go: macros of the kernel."""
        if lay.record_k > STEP:
            room = REGISTERS[self.warpgroups][1] - 3 * self.cols // 2
            return {"HALVES": 1, "DEPTH": 2, "TOGETHER": 4 if room >= 68 else 2 if room >= 52 else 1}
        if self.cols > 64 or (self.cols, self.warpgroups) == (64, 4):
            return {"HALVES": 2, "DEPTH": 3 if self.warpgroups < 3 and self.cols <= 128 else 2, "TOGETHER": 1}
        depth = 4 if self.cols == 32 and self.warpgroups < 4 else 3 if self.warpgroups < 3 else 2
        return {"HALVES": 1, "DEPTH": depth, "TOGETHER": 1}

    @property
    def tiles_x(self) -> int:
        """Eights of rows of x."""
        return self.cols // 8


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def shared(lay: Layout, c: Wide) -> int:
    """Bytes of dynamic shared memory."""
    span, tiles, kind = lay.record_k // STEP, c.rows // ROWS, sums_kind(lay)
    codes = lay.step_bytes if span > 1 else lay.record_bytes
    lines = 0 if span > 1 else 4 if kind == FLOAT else 2
    stage = _up(c.cols * 128 + _up(tiles * codes, 128) + lines * c.cols * 4, 1024)
    slots = (c.stages + 2 * span) // span if span > 1 else 0
    sums = c.cols * 32 if kind == PAIRS else 0
    slot = _up(sums + _up(c.cols * 4, 128) + tiles * (lay.record_bytes - lay.floats), 256)
    return 1024 + c.stages * stage + slots * slot


def legal(lay: Layout, c: Wide) -> bool:
    """Whether the kernel has the format, and such registers and shared memory are there."""
    held = 3 * c.cols // 2 + 32 if lay.record_k > STEP else c.cols + 48
    return (
        lay.format.name not in NONE
        and c.warpgroups in REGISTERS
        and c.cols <= 256
        and c.cols % (16 if lay.record_k > STEP else 32) == 0
        and held <= REGISTERS[c.warpgroups][1]
        and c.stages >= 2
        and shared(lay, c) <= SHARED
    )


def _deepest(lay: Layout, warpgroups: int, cols: int) -> Wide | None:
    """With as many stages as there is room for, up to eight."""
    for stages in range(8, 1, -1):
        if legal(lay, c := Wide(warpgroups, cols, stages)):
            return c
    return None


@lru_cache(maxsize=4096)
def config(lay: Layout, m: int, n: int, k: int, multiprocessors: int = 132) -> Wide | None:
    """The configuration that is likely the fastest; None where there is none."""
    if k == 0 or lay.tile_bytes(k) >= 2**31:
        return None
    found: list[tuple[float, Wide]] = []
    for warpgroups, (start, each) in COSTS[lay.record_k > STEP].items():
        for cols in range(32, min(128, _up(m, 32)) + 1, 32):
            c = _deepest(lay, warpgroups, cols)
            if c is not None:
                waves = -(-(-(-n // c.rows) * -(-m // cols)) // multiprocessors)
                found.append((waves * (-(-k // STEP) * (start + each * cols) + WAVE), c))
    return min(found)[1] if found else None


def places(lay: Layout, m: int, k: int) -> Places:
    """Where codes, scales and sums of x [m, k] lie in a workspace."""
    kind = sums_kind(lay)
    lines = -(-k // lay.format.block) * (2 if kind == FLOAT else 1)
    scales = _up(2 * m * k, 128)
    sums = scales + _up(4 * lines * _up(m, 16), 128)
    return Places(0, scales, sums, sums + (2 * m * (k // 16) if kind == PAIRS else 0))


def activations(lay: Layout, m: int, k: int, dtype: str, strides: Sequence[int], align: int, device: int) -> Bound:
    """``launch(stream, x, codes, scales, sums)``: see `quant_activations.bind`."""
    kind, (row, column) = sums_kind(lay), strides
    made = compiled(
        "integers/codes_wide.cu", "quant_activations_wide", device,
        BLOCK=lay.format.block, SUB=16 if kind == PAIRS else 32, SUMS=kind, **reading(dtype, strides, align, m),
    )  # fmt: skip
    return made.bind(
        ["ptr", ("i64", row), ("i64", column), "ptr", "ptr", "ptr", ("i32", m), ("i32", k)],
        grid=(-(-m * -(-k // SPAN) // WARPS),), block=(32 * WARPS,), pdl=True,
    )  # fmt: skip


def source(lay: Layout, c: Wide, types: int) -> tuple[str, tuple[str, ...]]:
    """The text to compile, and the compiler's options."""
    (producer, consumer), pieces = REGISTERS[c.warpgroups], c.pieces(lay)
    defines = {
        "WARPGROUPS": c.warpgroups, "BN": c.cols, "STAGES": c.stages, "SUMS": sums_kind(lay), "TYPES": types,
        "PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer, **pieces, **macros(lay),
    }  # fmt: skip
    options = tuple(f"-D{k}={int(v) if isinstance(v, bool) else v}" for k, v in defines.items())
    return instruction("f16", c.cols // pieces["HALVES"]) + '#include "quant/integers/wide.cu"\n', (
        "-std=c++17",
        *options,
    )


def bind(lay: Layout, m: int, n: int, k: int, c: Wide, tail: Tail, device: int) -> Launch:
    """``launch(stream, w, codes, scales, sums, out, bias)`` of the product."""
    from ...driver.facts import device as facts
    from ...driver.kernel import load
    from ...driver.nvrtc import compile_text
    from ...driver.tensormap import encoder

    here, span, kind = facts(device), lay.record_k // STEP, sums_kind(lay)
    text, options = source(lay, c, tail.types)
    made = load(
        compile_text(text, name="quant_int_wide_call.cu", arch=here.arch, options=options), "quant_int_wide", device
    )
    tiles_w, tiles_x = -(-n // c.rows), -(-m // c.cols)
    group = max(1, min(tiles_x, 16 * 2**20 // (2 * k * c.cols)))  # x of these stays in L2
    ints = (m, n, -(-k // STEP), tiles_w, tiles_x, group)
    strides: list[Parameter] = [("i64", v) for v in (tail.row, tail.column, tail.bias)]
    bound = made.bind(
        [*["map"] * 5, "ptr", "ptr", *strides, *(("i32", v) for v in ints)],
        grid=(min(tiles_w * tiles_x, here.multiprocessors),), block=(128 * (c.warpgroups + 1),), shared=shared(lay, c),
        pdl=True,
    )  # fmt: skip
    words, tiles = lay.tile_bytes(k) // 8, lay.tiles(n)

    def pieces(nbytes: int) -> Callable[[int], bytes]:
        """Tiles of 16 rows of W, each a run of bytes, of which the rows of a tile take `nbytes` at a time."""
        return encoder(
            "float64", sizes=(1, tiles, words), strides=(tiles * words, words, 1),
            box=(1, c.rows // ROWS, nbytes // 8), swizzle=0, promotion=256,
        )  # fmt: skip

    map_w = pieces(lay.step_bytes if span > 1 else lay.record_bytes)
    map_s = pieces(lay.record_bytes - lay.floats) if span > 1 else map_w
    map_x = encoder("float16", sizes=(1, m, k), strides=(m * k, k, 1), box=(1, c.cols, STEP), promotion=256)
    doubled = 2 if kind == FLOAT else 1
    lines, rows = -(-k // lay.format.block) * doubled, _up(m, 16)
    box = (1, 1 if span > 1 else 2 * doubled, c.cols)
    map_d = encoder("float32", sizes=(1, lines, rows), strides=(lines * rows, rows, 1), box=box, swizzle=0)
    map_t = map_d
    if kind == PAIRS:
        map_t = encoder(
            "float16", sizes=(1, m, k // 16), strides=(m * k // 16, k // 16, 1), box=(1, c.cols, 16), swizzle=32
        )

    def launch(stream: int, w: int, codes: int, scales: int, sums: int, out: int, bias: int) -> None:
        of_sums = map_t(sums) if kind == PAIRS else map_d(scales)
        bound(stream, map_x(codes), map_w(w), map_s(w), map_d(scales), of_sums, out, bias)

    return launch
