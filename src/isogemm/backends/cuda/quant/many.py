"""Products with quantized weights for many tokens: weights dequantized into the registers of wgmma.

    out = x @ W.T + bias, W rounded once to the type of x: the contract tensor_core:sm90/chain

A configuration is written as ``2x1x128 s8 c2``: consumer warpgroups, blocks of 64 rows of W that each holds, tokens
of a tile, stages of the ring and blocks of a cluster. ``2x1x128 s8 to 4224, 2x1x256 s6``: rows of W up to there in one
way, the rest in another one. None of it reaches the bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ....base.dtypes import CODE, ITEMSIZE, PTX
from ..driver import facts
from ..driver.kernel import ints, longs
from ..driver.nvrtc import function_of
from ..driver.tensormap import Encoder, encoder
from ..driver.wgmma import mma
from ..gemm.hopper.config import turned
from ..gemm.model import H200, Gpu, gpu_of, together
from .case import QuantCase
from .kernel import Launch, RoundedKernel, filling, work_of
from .layout import ROWS, STEP, PackedLayout, layout, macros

SHARED = 232448 - 1024  # bytes of dynamic shared memory that a block may have, less the barriers
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # of the producer and of consumers, by warpgroups


@dataclass(frozen=True, slots=True)
class ManyConfig:
    """One way to walk rows of W."""

    warpgroups: int
    blocks: int
    cols: int
    stages: int
    cluster: int = 1

    def __str__(self) -> str:
        text = f"{self.warpgroups}x{self.blocks}x{self.cols} s{self.stages}"
        return text + f" c{self.cluster}" * (self.cluster > 1)

    @property
    def rows(self) -> int:
        """Rows of W of a tile."""
        return 64 * self.warpgroups * self.blocks

    def shared(self, lay: PackedLayout) -> int:
        """Bytes of dynamic shared memory."""
        span, tiles = lay.span, self.rows // ROWS
        slots = (self.stages + 2 * span - 2) // span if span > 1 else 0
        stage = self.cols * 128 + -(-tiles * lay.code_bytes // 1024) * 1024
        slot = -(-tiles * lay.scale_bytes // 128) * 128
        return 1024 + self.stages * stage + slots * slot + turned(self.warpgroups, self.cols)


def legal(lay: PackedLayout, c: ManyConfig) -> bool:
    """Whether there are such registers and such shared memory."""
    registers = c.blocks * (c.cols // 2 + 32)
    return (
        c.warpgroups in REGISTERS
        and 1 <= c.blocks <= 2
        and c.cols % (8 * c.cluster) == 0
        and 8 <= c.cols <= 256
        and 2 <= c.stages <= 32
        and c.cluster in (1, 2, 4)
        and registers <= REGISTERS[c.warpgroups][1] - 40
        and c.shared(lay) <= SHARED
    )


def deepest(lay: PackedLayout, warpgroups: int, blocks: int, cols: int) -> ManyConfig | None:
    """The configuration with as many stages as there is room for; None where no ring of three fits."""
    several = (ManyConfig(warpgroups, blocks, cols, stages) for stages in range(16, 2, -1))
    return next((c for c in several if legal(lay, c)), None)


COLS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 176, 208, 256)
SHAPES = ((1, 1), (2, 1), (2, 2), (3, 1))  # warpgroups, and blocks of 64 rows of W of each
# A model of the time, fitted to timings of 191 drawn products on an H200, in us to 64 of K: what dequantizing takes, by
# shape, and products for each row of x and block of 64 rows of W; some of the lesser time is not hidden behind the
# greater one.
WORK, TENSOR, LEFT = {(1, 1): 0.198, (2, 1): 0.267, (2, 2): 0.463, (3, 1): 0.408}, 0.00063, 0.576
START, WAVE, STORE = 1.1, 0.39, 0.005  # of a launch, of a wave of tiles, of each row of x and block
MEMORY, CACHE = 614.0, 88800.0  # bytes a us: for each GB/s of the bus; from the second-level cache, by multiprocessor
COLS_OF_WAVES = 96  # of tiles of which whole waves may be walked first
AGAIN = 1.4  # of another launch for the rest of W


class RowsOfW(NamedTuple):
    """Some rows of W, and how they are walked."""

    first: int
    rows: int
    config: ManyConfig


class ManyWalk(NamedTuple):
    """How W is walked: in one way, or so many rows in one and the rest in another."""

    config: ManyConfig
    rows: int = 0
    rest: ManyConfig | None = None

    def __str__(self) -> str:
        return str(self.config) if self.rest is None else f"{self.config} to {self.rows}, {self.rest}"

    def parts(self, n: int) -> tuple[RowsOfW, ...]:
        """The parts of n rows; where the first would take them all, it takes half of them."""
        if self.rest is None:
            return (RowsOfW(0, n, self.config),)
        first = self.rows if self.rows < n else n // 128 * 64
        found = (RowsOfW(0, first, self.config), RowsOfW(first, n - first, self.rest))
        return tuple(part for part in found if part.rows)


def _microseconds(lay: PackedLayout, c: ManyConfig, m: int, n: int, k: int, gpu: Gpu) -> float:
    """A model: waves of tiles, all rows of x out of the second-level cache, and weights out of memory, side by side."""
    tiles = -(-n // (c.rows * c.cluster)) * c.cluster * -(-m // c.cols)
    waves, steps, blocks = -(-tiles // gpu.multiprocessors), -(-k // STEP), c.warpgroups * c.blocks
    work, tensor = WORK[c.warpgroups, c.blocks] * work_of(lay), TENSOR * c.cols * blocks
    step = together(work, tensor) + LEFT * min(work, tensor)
    walks = waves * (steps * step + WAVE + STORE * c.cols * blocks)
    cached = tiles * steps * c.cols * 128 / (CACHE * gpu.multiprocessors)
    moved = (lay.nbytes(n, k) + 2 * m * (n + k)) / (MEMORY * gpu.memory)
    return START + together(walks, cached, moved)


@functools.lru_cache(maxsize=4096)
def best(format: str, m: int, n: int, k: int, multiprocessors: int = 132) -> ManyWalk:
    """How W is likely walked the fastest: all in one way, or whole waves of tiles of one size, then the rest."""
    gpu = H200._replace(multiprocessors=multiprocessors)
    lay = layout(format)
    configs = [
        c
        for w, b in SHAPES
        for cols in COLS
        if (cols - m < 16 or cols == COLS[0]) and (c := deepest(lay, w, b, cols)) is not None
    ]

    def fastest(rows: int) -> tuple[float, ManyConfig]:
        costs = [_microseconds(lay, c, m, rows, k, gpu) for c in configs]
        return min(zip(costs, configs, strict=True), key=lambda pair: pair[0])

    cost, config = fastest(n)
    found = ManyWalk(config)
    for c in configs:
        across = -(-m // c.cols)
        last = -(-n // c.rows) * across // gpu.multiprocessors
        for waves in range(max(1, last - 2), last + 1) if c.cols >= COLS_OF_WAVES else ():
            rows = waves * gpu.multiprocessors // across * c.rows
            if not 0 < rows < n:
                continue
            rest, other = fastest(n - rows)
            both = _microseconds(lay, c, m, rows, k, gpu) + rest + AGAIN
            if both < (0.98 if found.rest is None else 1) * cost:
                cost, found = both, ManyWalk(c, rows, other)
    return found


class QuantMany(RoundedKernel):
    """x of bfloat16 or float16, rows of whole 16 bytes; they want at least 33 of them to be of use."""

    name = "quant many"

    def takes(self, case: QuantCase) -> bool:
        return max(case.m, case.n, case.k) < 2**30 and super().takes(case)

    def configure(self, case: QuantCase, multiprocessors: int) -> ManyWalk:
        return best(case.format, case.m, case.n, case.k, multiprocessors)

    def microseconds(self, case: QuantCase, config: ManyWalk, device: int) -> float:
        lay, gpu, walked = layout(case.format), gpu_of(device), config.parts(case.n)
        each = (_microseconds(lay, part.config, case.m, part.rows, case.k, gpu) for part in walked)
        return sum(each) + AGAIN * (len(walked) - 1)

    def tile(self, config: ManyWalk) -> int:
        return STEP

    def build(self, case: QuantCase, config: ManyWalk, device: int) -> Launch:
        launches = [_bind_part(case, part, device, late=i > 0) for i, part in enumerate(config.parts(case.n))]
        if len(launches) == 1:
            return launches[0]

        def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
            for each in launches:
                each(stream, x, data, out, bias)

        return launch


KERNEL = QuantMany()


def _bind_part(case: QuantCase, part: RowsOfW, device: int, *, late: bool) -> Launch:
    """``launch(stream, x, data, out, bias)`` for some rows, of addresses of the whole."""
    here, lay, c = facts.device(device), layout(case.format), part.config
    bias = case.dtype_bias
    defines: dict[str, object] = {
        **macros(lay), "OPERAND": CODE[case.dtype], "OUT": CODE[case.dtype_out], "BIAS_KIND": case.bias_kind,
        "BIAS_ROWS": 1, "EPILOGUE": bias is not None, "C_KIND": -1, "ACCUMULATE": 0, "COLUMNS": 1, "VECTOR": case.wide,
        "BN": c.cols,
        "MW": c.blocks, "WARPGROUPS": c.warpgroups, "STAGES": c.stages, "CM": c.cluster,
        "PRODUCER_REGISTERS": REGISTERS[c.warpgroups][0], "CONSUMER_REGISTERS": REGISTERS[c.warpgroups][1],
    }  # fmt: skip
    made = function_of(
        "quant/many.cu", "quant_many", device, defines, before=mma(PTX[case.dtype], c.cols, registers=True)
    )
    tiles_w, tiles_x = -(-part.rows // (c.rows * c.cluster)), -(-case.m // c.cols)
    most = here.multiprocessors // c.cluster
    clusters = filling(min(tiles_w * tiles_x, most), most)
    sizes = (part.rows, case.m, -(-case.k // STEP), tiles_w, tiles_x, grouped(tiles_x, case.k, c.cols), int(late))
    bias_step = 0 if bias is None else case.bias_stride
    out_step, x_step = (case.out[0], case.x[0]) if case.m > 1 else (case.n, -(-case.k // 8) * 8)
    bound = made.bind(
        [*["map"] * 3, "ptr", "ptr", *longs(out_step, bias_step), *ints(*sizes)],
        grid=(clusters * c.cluster,), block=(128 * (c.warpgroups + 1),), shared=c.shared(lay), cluster=(c.cluster,),
        pdl=True,
    )  # fmt: skip
    map_x = encoder(
        case.dtype, sizes=(1, case.m, case.k), strides=(x_step * case.m, x_step, 1), box=(1, c.cols // c.cluster, STEP)
    )  # fmt: skip
    map_w, map_s = maps_of(lay, part.rows, case.k, c.rows)
    of_data, of_out = part.first // ROWS * lay.tile_bytes(case.k), part.first * ITEMSIZE[case.dtype_out]
    of_bias = 0 if bias is None else part.first * bias_step * ITEMSIZE[bias]

    def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
        w = data + of_data
        bound(stream, map_x(x), map_w(w), map_s(w), out + of_out, bias + of_bias)

    return launch


def grouped(tiles_x: int, k: int, cols: int) -> int:
    """Tiles whose rows of x stay in the second-level cache together."""
    return max(1, min(tiles_x, 16 * 2**20 // (2 * k * cols)))


def maps_of(lay: PackedLayout, rows: int, k: int, block_rows: int, steps: int = 1) -> tuple[Encoder, Encoder]:
    """Maps of W's codes and of their scales: `steps` times 64 of K of the tiles of a block."""
    tiles, words, taken = lay.tiles(rows), lay.tile_bytes(k) // 8, block_rows // ROWS

    def of(sizes: tuple[int, int], step: int, box: tuple[int, int]) -> Encoder:
        """(steps, words) of a tile, so many words from step to step; and those of the box."""
        return encoder(
            "float64", sizes=(sizes[0], tiles, sizes[1]), strides=(step, words, 1), box=(box[0], taken, box[1]),
            swizzle=0
        )  # fmt: skip

    record, code = lay.record_bytes // 8, lay.code_bytes // 8
    if lay.span == 1:  # what is behind K is zeros
        codes = of((lay.records(k), record), record, (steps, record))
        return codes, codes
    return of((steps, words), code, (steps, code)), of((1, words), words, (1, lay.scale_bytes // 8))
