"""Codes of activations times quantized weights for many rows of x: ``int32/chain`` by wgmma on float16.

Codes are integers that float16 holds, and float32 accumulators hold their sums exactly: quant/integers/wide.cu. The
kernel for codes of x is one of its own, quant/integers/codes_wide.cu. No configuration reaches the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...driver import facts
from ...driver.kernel import Bound, ints
from ...driver.nvrtc import function_of
from ...driver.tensormap import encoder
from ...driver.wgmma import mma
from ...gemm.model import H200, Gpu, together
from ..case import QuantCase
from ..layout import ROWS, STEP, PackedLayout, layout, macros
from ..many import REGISTERS as FEWER
from ..many import SHARED, grouped, maps_of
from .activations import FLOAT, PAIRS, sums_kind

REGISTERS = FEWER | {4: (24, 112)}
# A model of the time, fitted to 1,372 timings of 180 products on an H200, in us: to 64 of K of a wave of tiles, by
# warpgroups, and for each row of x in it. True: super-blocks.
COSTS = {
    False: {1: (0.119, 0.0030), 2: (0.155, 0.0048), 3: (0.182, 0.0068), 4: (0.175, 0.0101)},
    True: {1: (0.183, 0.0011), 2: (0.199, 0.0024), 3: (0.241, 0.0035), 4: (0.174, 0.0087)},
}
START, STORE = 2.4, 0.012  # of both launches; of a wave, for each row of x and warpgroup
CODES, MEMORY = 8e5, 600.0  # values of x a us that become codes; bytes a us of weights, for each GB/s of the bus
NONE = ("Q5_K", "Q6_K")  # products s q too large for sums over much of K: `ManyCodes`


class WideCodes(NamedTuple):
    """How quant/integers/wide.cu shares out rows."""

    warpgroups: int  # consumers, each with 64 rows of W
    cols: int  # rows of x of a tile
    stages: int  # of the ring, each with 64 of K

    @property
    def rows(self) -> int:
        """Rows of W of a tile."""
        return 64 * self.warpgroups

    def pieces(self, lay: PackedLayout) -> dict[str, int]:
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

    def form(self, lay: PackedLayout) -> str:
        """The form of the codes of x that it takes."""
        return "float16"

    def bind(self, case: QuantCase, device: int) -> Bound:
        """``launch(stream, w, codes, scales, sums, out, bias)``."""
        (m, n, k), lay, here = (case.m, case.n, case.k), layout(case.format), facts.device(device)
        span, kind, pieces = lay.span, sums_kind(lay), self.pieces(lay)
        producer, consumer = REGISTERS[self.warpgroups]
        defines: dict[str, object] = {
            "WARPGROUPS": self.warpgroups, "BN": self.cols, "STAGES": self.stages, "SUMS": kind, "TYPES": case.types,
            "PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer, **pieces, **macros(lay),
        }  # fmt: skip
        before = mma("f16", self.cols // pieces["HALVES"], registers=True)
        made = function_of("quant/integers/wide.cu", "quant_int_wide", device, defines, before=before)
        tiles_w, tiles_x = -(-n // self.rows), -(-m // self.cols)
        sizes = (m, n, -(-k // STEP), tiles_w, tiles_x, grouped(tiles_x, k, self.cols))
        bound = made.bind(
            [*["map"] * 5, "ptr", "ptr", *case.steps, *ints(*sizes)],
            grid=(min(tiles_w * tiles_x, here.multiprocessors),), block=(128 * (self.warpgroups + 1),),
            shared=shared(lay, self), pdl=True,
        )  # fmt: skip
        map_w, map_s = maps_of(lay, n, k, self.rows)
        map_x = encoder("float16", sizes=(1, m, k), strides=(m * k, k, 1), box=(1, self.cols, STEP))
        doubled = 2 if kind == FLOAT else 1
        lines, rows = -(-k // lay.format.block) * doubled, _up(m, 16)
        box = (1, 1 if span > 1 else 2 * doubled, self.cols)
        map_d = encoder("float32", sizes=(1, lines, rows), strides=(lines * rows, rows, 1), box=box, swizzle=0)
        map_t = map_d
        if kind == PAIRS:
            map_t = encoder(
                "float16", sizes=(1, m, k // 16), strides=(m * k // 16, k // 16, 1), box=(1, self.cols, 16), swizzle=32
            )

        def launch(stream: int, w: int, codes: int, scales: int, sums: int, out: int, bias: int) -> None:
            of_sums = map_t(sums) if kind == PAIRS else map_d(scales)
            bound(stream, map_x(codes), map_w(w), map_s(w), map_d(scales), of_sums, out, bias)

        return launch


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def shared(lay: PackedLayout, c: WideCodes) -> int:
    """Bytes of dynamic shared memory."""
    span, tiles, kind = lay.span, c.rows // ROWS, sums_kind(lay)
    lines = 0 if span > 1 else 4 if kind == FLOAT else 2
    stage = _up(c.cols * 128 + _up(tiles * lay.code_bytes, 128) + lines * c.cols * 4, 1024)
    slots = (c.stages + 2 * span) // span if span > 1 else 0
    sums = c.cols * 32 if kind == PAIRS else 0
    slot = _up(sums + _up(c.cols * 4, 128) + tiles * lay.scale_bytes, 256)
    return 1024 + c.stages * stage + slots * slot


def legal(lay: PackedLayout, c: WideCodes) -> bool:
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


def _deepest(lay: PackedLayout, warpgroups: int, cols: int) -> WideCodes | None:
    """The configuration with as many stages as there is room for, up to eight."""
    several = (WideCodes(warpgroups, cols, stages) for stages in range(8, 1, -1))
    return next((c for c in several if legal(lay, c)), None)


def options(lay: PackedLayout, m: int, n: int, k: int, gpu: Gpu = H200) -> Iterator[tuple[float, WideCodes]]:
    """Configurations, and the microseconds to expect; none where the kernel has not the format or K."""
    if k == 0 or lay.tile_bytes(k) >= 2**31:
        return
    moved = (lay.nbytes(n, k) + 2 * m * (n + 2 * k)) / (MEMORY * gpu.memory)
    for warpgroups, (start, each) in COSTS[lay.record_k > STEP].items():
        for cols in range(32, min(128, _up(m, 32)) + 1, 32):
            c = _deepest(lay, warpgroups, cols)
            if c is not None:
                waves = -(-(-(-n // c.rows) * -(-m // cols)) // gpu.multiprocessors)
                walks = waves * (-(-k // STEP) * (start + each * cols) + STORE * cols * warpgroups)
                yield START + m * k / CODES + together(walks, moved), c
