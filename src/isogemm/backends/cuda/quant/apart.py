"""Products with quantized weights dequantized into shared memory by warps of their own: tensor_core:sm90/chain.

A configuration is written as ``x16x48x256 s7 m5 d8 e2``: whose rows are the rows of an instruction, those of x
or of W (``w``); rows of W and of x of a tile, and K of a stage; stages of the ring; stages of weights in the type of x;
warps that dequantize, and how many times 16 rows and 64 of K each takes at once. None of it reaches the bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....base.dtypes import CODE, PTX
from ..driver import facts
from ..driver.kernel import ints, longs
from ..driver.nvrtc import function_of
from ..driver.tensormap import encoder
from ..driver.wgmma import mma
from ..gemm.hopper.config import turned
from ..gemm.model import H200, Gpu, gpu_of, together
from .case import QuantCase
from .kernel import Launch, RoundedKernel, filling
from .layout import ROWS, STEP, PackedLayout, layout, macros
from .many import SHARED, grouped, maps_of


@dataclass(frozen=True, slots=True)
class ApartConfig:
    """A configuration."""

    first: str  # whose rows are an instruction's: w or x
    # rows, cols: of W and of x; depth: K of a stage
    rows: int
    cols: int
    depth: int
    # stages, made: of the ring, and of weights as they are multiplied
    stages: int
    made: int
    # decoders, each: warps, and how many times 16 rows and 64 of K one takes at once
    decoders: int
    each: int

    def __str__(self) -> str:
        tile = f"{self.first}{self.rows}x{self.cols}x{self.depth}"
        return f"{tile} s{self.stages} m{self.made} d{self.decoders} e{self.each}"

    @property
    def sides(self) -> tuple[int, int]:
        """Rows of the first operand, and of the second."""
        return (self.rows, self.cols) if self.first == "w" else (self.cols, self.rows)

    @property
    def warpgroups(self) -> int:
        """Consumers: one for 64 rows, up to three; two own 128 rows each where there are 256."""
        blocks = -(-self.sides[0] // 64)
        return 2 if blocks == 4 else blocks

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows of each."""
        return -(-self.sides[0] // (64 * self.warpgroups))

    @property
    def jobs(self) -> int:
        """What warps take at once, of a stage."""
        return self.rows // ROWS * (self.depth // STEP) // self.each

    @property
    def ahead(self) -> int:
        """Stages that the warps which dequantize have in hand at once."""
        return -(-self.decoders // self.jobs)

    @property
    def threads(self) -> int:
        """Threads of a block: consumers, warps that dequantize, and one that brings stages."""
        return 128 * self.warpgroups + 32 * self.decoders + 32

    @property
    def registers(self) -> int:
        """Registers that a thread may have."""
        return 65536 // self.threads // 8 * 8

    def shared(self, lay: PackedLayout) -> int:
        """Bytes of dynamic shared memory."""
        span, tiles, steps = lay.span, self.rows // ROWS, self.depth // STEP
        slots = self.stages if span > 1 else 0
        stage = -(-steps * (self.cols * 128 + tiles * lay.code_bytes) // 1024) * 1024
        slot = -(-tiles * lay.scale_bytes // 128) * 128
        nobody = 64 * self.warpgroups * self.blocks - self.sides[0]
        beside = turned(self.warpgroups, self.cols) if self.first == "w" else 128 * nobody
        return 1024 + self.made * steps * self.rows * 128 + self.stages * stage + slots * slot + beside


def legal(lay: PackedLayout, c: ApartConfig) -> bool:
    """Whether there are such registers and such shared memory, and whether parities tell the stages in hand apart.

    Scales of super-blocks come with every stage, as a warp does not see all of them arrive.
    """
    steps = c.depth // STEP
    return (
        (lay.span == 1 or lay.span % steps == 0)
        and c.rows % ROWS == 0
        and c.rows // ROWS * steps % c.each == 0
        and (steps % c.each == 0 or c.each % steps == 0)
        and c.cols % 8 == 0
        and max(c.rows, c.cols) <= 256
        and c.warpgroups <= 3
        and c.blocks <= 2
        and c.made >= max(2, c.ahead)
        and c.stages >= c.made + c.ahead
        and c.threads <= 1024
        and c.blocks * c.sides[1] // 2 + 40 <= c.registers
        and c.shared(lay) <= SHARED
    )


def _deepest(lay: PackedLayout, c: ApartConfig) -> ApartConfig | None:
    """The configuration with as many stages as there is room for, up to 24; None where parities need more."""
    most = replace(c, stages=24)
    over = most.shared(lay) - SHARED
    if over > 0:
        each = (most.shared(lay) - replace(c, stages=0).shared(lay)) // 24
        most = replace(c, stages=24 - -(-over // each))
        while most.stages > 0 and most.shared(lay) > SHARED:
            most = replace(most, stages=most.stages - 1)
    return most if legal(lay, most) else None


# Rows of W and K of a stage, and warps that dequantize with what each takes at once, worth trying; parts of x.
SHAPES = ((16, 256), (32, 128), (32, 256), (48, 128), (48, 256), (64, 128))
DECODERS = ((8, 1), (8, 2), (12, 2), (16, 2))
PARTS = (1, 2, 3, 4, 5, 6, 8)
# A model of the time, fitted to timings on an H200, in cycles to 64 of K: bytes that shared memory gives in one, and
# all of the second-level cache; what a scheduler takes for 16 rows of W, times SUBS with sub-blocks of 16, and for each
# time that a warp takes some; an instruction, and each of its columns; a stage, which is handed over to one warpgroup,
# or to several.
BYTES, CACHE = 207.0, 16750.0
DECODE, SUBS, PIECE, FEW_WARPS = 287.0, 1.31, 143.0, 0.134
INSTRUCTION, COLUMN = 13.4, 1.15
HAND, HANDS = 165.0, 286.0
POWER = 2.45  # of times that overlap
WAVE, STORE, START = 860.0, 0.123, 2190.0  # of a wave, of an element of a tile; of a launch
MEMORY, CLOCK = 512.0, 1980.0  # bytes a us for each GB/s of the bus; cycles of a us


def _microseconds(lay: PackedLayout, c: ApartConfig, m: int, n: int, k: int, gpu: Gpu) -> float:
    """A model: a stage takes what shared memory, dequantizing, products and the cache do, side by side."""
    tiles = -(-n // c.rows) * -(-m // c.cols)
    waves, blocks = -(-tiles // gpu.multiprocessors), c.warpgroups * c.blocks
    raw = c.rows * lay.record_bytes * STEP / (ROWS * lay.record_k)
    decode = DECODE * (SUBS if lay.format.sub == 16 else 1.0) + PIECE / c.each
    times = (
        (128 * (c.cols + c.rows) + 2 * raw + 4 * blocks * (2048 + 32 * c.sides[1])) / BYTES,
        c.rows / 64 * decode * (1 + FEW_WARPS * max(0.0, 3 - c.decoders / 4)),
        4 * blocks * max(COLUMN * c.sides[1], INSTRUCTION * (blocks == 1)),
        (HAND if c.warpgroups == 1 else HANDS) * STEP / c.depth,
        (128 * c.cols + raw) * min(tiles, gpu.multiprocessors) / CACHE,
    )
    step = sum(time**POWER for time in times) ** (1 / POWER)
    walks = waves * (-(-k // STEP) * step + WAVE + STORE * c.rows * c.cols)
    moved = lay.nbytes(n, k) / (MEMORY * gpu.memory)
    return START / CLOCK + together(walks / CLOCK, moved)


def _configs(lay: PackedLayout, m: int) -> Iterator[ApartConfig]:
    """Configurations worth trying for so many rows of x."""
    for cols in sorted({(m + 8 * parts - 1) // (8 * parts) * 8 for parts in PARTS}):
        for first, (rows, depth), (decoders, each) in itertools.product("xw", SHAPES, DECODERS):
            c = ApartConfig(first, rows, cols, depth, 0, 0, decoders, each)
            found = _deepest(lay, replace(c, made=max(3, c.ahead + 1)))
            if found is not None:
                yield found


@functools.lru_cache(maxsize=4096)
def best(format: str, m: int, n: int, k: int, multiprocessors: int = 132) -> ApartConfig:
    """The configuration that is likely the fastest."""
    gpu, lay = H200._replace(multiprocessors=multiprocessors), layout(format)
    return min(_configs(lay, m), key=lambda c: _microseconds(lay, c, m, n, k, gpu))


class QuantApart(RoundedKernel):
    """x of bfloat16 or float16, up to 512 rows of whole 16 bytes."""

    name, most = "quant apart", 512

    def takes(self, case: QuantCase) -> bool:
        return max(case.n, case.k) < 2**30 and super().takes(case)

    def configure(self, case: QuantCase, multiprocessors: int) -> ApartConfig:
        return best(case.format, case.m, case.n, case.k, multiprocessors)

    def microseconds(self, case: QuantCase, config: ApartConfig, device: int) -> float:
        return _microseconds(layout(case.format), config, case.m, case.n, case.k, gpu_of(device))

    def tile(self, config: ApartConfig) -> int:
        return STEP

    def build(self, case: QuantCase, config: ApartConfig, device: int) -> Launch:
        lay, c, bias, w_first = layout(case.format), config, case.dtype_bias, config.first == "w"
        defines: dict[str, object] = {
            **macros(lay), "OPERAND": CODE[case.dtype], "OUT": CODE[case.dtype_out], "BIAS_KIND": case.bias_kind,
            "BIAS_ROWS": w_first, "EPILOGUE": bias is not None, "C_KIND": -1, "ACCUMULATE": 0, "COLUMNS": w_first,
            "VECTOR": case.wide, "W_FIRST": w_first, "BN": c.sides[1], "BW": c.rows, "BX": c.cols,
            "KS": c.depth // STEP, "MW": c.blocks, "WARPGROUPS": c.warpgroups, "STAGES": c.stages, "MADE": c.made,
            "DECODERS": c.decoders, "EACH": c.each, "WHOLE": case.k % STEP == 0,
        }  # fmt: skip
        made = function_of("quant/apart.cu", "quant_apart", device, defines, before=mma(PTX[case.dtype], c.sides[1]))
        tiles_w, tiles_x = -(-case.n // c.rows), -(-case.m // c.cols)
        most = facts.device(device).multiprocessors
        sizes = (case.n, case.m, -(-case.k // c.depth), tiles_w, tiles_x, grouped(tiles_x, case.k, c.cols))
        bias_step = 0 if bias is None else case.bias_stride
        out_step, x_step = (case.out[0], case.x[0]) if case.m > 1 else (case.n, -(-case.k // 8) * 8)
        bound = made.bind(
            [*["map"] * 3, "ptr", "ptr", *longs(out_step, bias_step), *ints(*sizes)],
            grid=(filling(min(tiles_w * tiles_x, most), most),), block=(c.threads,), shared=c.shared(lay), pdl=True,
        )  # fmt: skip
        steps, whole = c.depth // STEP, case.k % STEP == 0
        map_x = encoder(
            case.dtype, sizes=(case.k // STEP, case.m, STEP) if whole else (1, case.m, case.k),
            strides=(STEP if whole else x_step * case.m, x_step, 1), box=(steps if whole else 1, c.cols, STEP)
        )  # fmt: skip
        map_w, map_s = maps_of(lay, case.n, case.k, c.rows, steps)

        def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
            bound(stream, map_x(x), map_w(data), map_s(data), out, bias)

        return launch


KERNEL = QuantApart()
