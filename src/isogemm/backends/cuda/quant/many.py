"""Products with quantized weights for many tokens: weights dequantized into the registers of wgmma.

    out = x @ W.T + bias, W rounded once to the type of x: the contract tensor_core:sm90/chain

A configuration is a text such as ``2x1x128 s8 c2``: consumer warpgroups, blocks of 64 rows of W that each holds, tokens
of a tile, stages of the ring and blocks of a cluster. ``2x1x128 s8 to 4224, 2x1x256 s6``: rows of W up to there in one
way, the rest in another one. None of it reaches the bits.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

from ....base.dtypes import CODE, ITEMSIZE, PTX
from ....errors import OptionError
from ..driver import facts
from ..driver.nvrtc import function_of
from ..driver.tensormap import Encoder, encoder
from ..driver.wgmma import mma
from .case import QuantCase
from .kernel import Launch, RoundedKernel
from .layout import ROWS, STEP, PackedLayout, layout, macros

__all__ = ["KERNEL", "ManyConfig", "RowsOfW", "best", "legal", "parts", "tiles_map"]

SHARED = 232448 - 1024  # bytes of dynamic shared memory that a block may have, less the barriers
TEXT = re.compile(r"(\d)x(\d)x(\d+) s(\d+)(?: c(\d))?")


@dataclass(frozen=True, slots=True)
class ManyConfig:
    """A configuration, read."""

    warpgroups: int
    blocks: int
    cols: int
    stages: int
    cluster: int = 1

    @classmethod
    def parse(cls, text: str) -> ManyConfig | None:
        """Read a text; None where it is not one."""
        match = TEXT.fullmatch(text)
        return cls(*(int(x or 1) for x in match.groups())) if match else None

    def __str__(self) -> str:
        text = f"{self.warpgroups}x{self.blocks}x{self.cols} s{self.stages}"
        return text + f" c{self.cluster}" * (self.cluster > 1)

    @property
    def rows(self) -> int:
        """Rows of W of a tile."""
        return 64 * self.warpgroups * self.blocks

    def shared(self, lay: PackedLayout) -> int:
        """Bytes of dynamic shared memory."""
        span, tiles = lay.record_k // STEP, self.rows // ROWS
        codes = lay.step_bytes if span > 1 else lay.record_bytes
        slots = (self.stages + 2 * span - 2) // span if span > 1 else 0
        stage = self.cols * 128 + -(-tiles * codes // 1024) * 1024
        slot = -(-tiles * (lay.record_bytes - lay.floats) // 128) * 128
        return 1024 + self.stages * stage + slots * slot


def legal(lay: PackedLayout, c: ManyConfig) -> bool:
    """Whether there are such registers and such shared memory."""
    registers = c.blocks * (c.cols // 2 + 32)
    return (
        c.warpgroups in (2, 3)
        and 1 <= c.blocks <= 2
        and c.cols % (8 * c.cluster) == 0
        and 8 <= c.cols <= 256
        and 2 <= c.stages <= 32
        and c.cluster in (1, 2, 4)
        and registers <= (192 if c.warpgroups == 2 else 112)
        and c.shared(lay) <= SHARED
    )


def deepest(lay: PackedLayout, warpgroups: int, blocks: int, cols: int, cluster: int = 1) -> ManyConfig | None:
    """With as many stages as there is room for; None where no ring of three fits."""
    several = (ManyConfig(warpgroups, blocks, cols, stages, cluster) for stages in range(16, 2, -1))
    return next((c for c in several if legal(lay, c)), None)


COLS = (64, 96, 128, 176, 256)
SHAPES = ((2, 1), (2, 2), (3, 1))
# Measured on an H200, in us to 64 of K: a token's products with a block of 64 rows; dequantizing 2, 3 or 4 such blocks,
# which hides behind products of other warps alone. Integer scales of sub-blocks cost a fifth more.
TENSOR, WORK, INTEGERS = 0.0014, {2: 0.30, 3: 0.37, 4: 0.44}, 1.2
START, WAVE = 2.5, 0.8  # us of a launch, and of a wave of tiles


class RowsOfW(NamedTuple):
    """Some rows of W, and how they are walked."""

    first: int
    rows: int
    config: ManyConfig


def _microseconds(lay: PackedLayout, c: ManyConfig, m: int, n: int, k: int, multiprocessors: int) -> float:
    """A model: whole waves of tiles, bound by tensor cores or by the warps' own work."""
    tiles = -(-n // (c.rows * c.cluster)) * c.cluster * -(-m // c.cols)
    blocks = c.warpgroups * c.blocks
    tensor = TENSOR * c.cols * blocks
    step = max(tensor, WORK[blocks] * (INTEGERS if lay.ints_each else 1) + 0.6 * tensor)
    return -(-tiles // multiprocessors) * (-(-k // STEP) * step + WAVE)


@functools.lru_cache(maxsize=4096)
def best(format: str, m: int, n: int, k: int, multiprocessors: int = 132) -> str:
    """How W is likely walked the fastest: all in one way, or whole waves of tiles of one size, then the rest."""
    lay = layout(format)
    configs = [c for w, b in SHAPES for cols in COLS if (c := deepest(lay, w, b, cols)) is not None]

    def fastest(rows: int) -> tuple[float, ManyConfig]:
        costs = [_microseconds(lay, c, m, rows, k, multiprocessors) for c in configs]
        return min(zip(costs, configs, strict=True), key=lambda pair: pair[0])

    cost, config = fastest(n)
    found = str(config)
    for c in configs:
        across = -(-m // c.cols)
        for waves in range(1, 1 + -(-n // c.rows) * across // multiprocessors):
            rows = waves * multiprocessors // across * c.rows
            if not 0 < rows < n:
                continue
            rest, other = fastest(n - rows)
            both = _microseconds(lay, c, m, rows, k, multiprocessors) + rest + START
            if both < (1 if "," in found else 0.98) * cost:
                cost, found = both, f"{c} to {rows}, {other}"
    return found


def parts(config: str, n: int) -> tuple[RowsOfW, ...]:
    """What a text means for n rows; where the first part would take them all, it takes half of them.

    Raises
    ------
    OptionError
        The text is none.
    """
    match = re.fullmatch(r"(.*) to (\d+), (.*)", config)
    texts = (match[1], match[3]) if match else (config,)
    read = [ManyConfig.parse(text) for text in texts]
    if any(c is None for c in read):
        raise OptionError(
            "configuration of quantized products", limit="as 2x1x128 s8", value=config, nearest="2x1x128 s8"
        )
    chosen = [c for c in read if c is not None]
    if match is None:
        return (RowsOfW(0, n, chosen[0]),)
    first = int(match[2]) if int(match[2]) < n else n // 128 * 64
    found = (RowsOfW(0, first, chosen[0]), RowsOfW(first, n - first, chosen[1]))
    return tuple(part for part in found if part.rows)


class QuantMany(RoundedKernel):
    """x of bfloat16 or float16, rows of whole 16 bytes; they want at least 33 of them to be of use."""

    name = "quant many"

    def takes(self, case: QuantCase) -> bool:
        return max(case.m, case.n, case.k) < 2**30 and super().takes(case)

    def configure(self, case: QuantCase, multiprocessors: int) -> str:
        return best(case.format, case.m, case.n, case.k, multiprocessors)

    def tile(self, config: str) -> int:
        return STEP

    def build(self, case: QuantCase, config: str | ManyConfig | None, device: int) -> Launch:
        text = config or self.configure(case, facts.device(device).multiprocessors)
        launches = [_bind_part(case, part, device, late=i > 0) for i, part in enumerate(parts(str(text), case.n))]
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
        "PRODUCER_REGISTERS": 40 if c.warpgroups == 2 else 32,
        "CONSUMER_REGISTERS": 232 if c.warpgroups == 2 else 160,
    }  # fmt: skip
    made = function_of(
        "quant/many.cu", "quant_many", device, defines, before=mma(PTX[case.dtype], c.cols, registers=True)
    )
    tiles_w, tiles_x = -(-part.rows // (c.rows * c.cluster)), -(-case.m // c.cols)
    clusters = min(tiles_w * tiles_x, here.multiprocessors // c.cluster)
    group = max(1, min(tiles_x, 16 * 2**20 // (2 * case.k * c.cols)))  # x of these stays in L2
    ints = (part.rows, case.m, -(-case.k // STEP), tiles_w, tiles_x, group, int(late))
    bias_step = 0 if bias is None else case.bias_stride
    out_step, x_step = (case.out[0], case.x[0]) if case.m > 1 else (case.n, -(-case.k // 8) * 8)
    bound = made.bind(
        ["map", "map", "map", "ptr", "ptr", ("i64", out_step), ("i64", bias_step), *(("i32", v) for v in ints)],
        grid=(clusters * c.cluster,), block=(128 * (c.warpgroups + 1),), shared=c.shared(lay), cluster=(c.cluster,),
        pdl=True,
    )  # fmt: skip
    map_x = encoder(
        case.dtype, sizes=(1, case.m, case.k), strides=(x_step * case.m, x_step, 1), box=(1, c.cols // c.cluster, STEP),
        promotion=256,
    )  # fmt: skip
    together = lay.record_k == STEP
    map_w = tiles_map(lay, part.rows, case.k, c.rows, lay.record_bytes if together else lay.step_bytes)
    map_s = map_w if together else tiles_map(lay, part.rows, case.k, c.rows, lay.record_bytes - lay.floats)
    of_data, of_out = part.first // ROWS * lay.tile_bytes(case.k), part.first * ITEMSIZE[case.dtype_out]
    of_bias = 0 if bias is None else part.first * bias_step * ITEMSIZE[bias]

    def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
        w = data + of_data
        bound(stream, map_x(x), map_w(w), map_s(w), out + of_out, bias + of_bias)

    return launch


def tiles_map(lay: PackedLayout, rows: int, k: int, block_rows: int, nbytes: int) -> Encoder:
    """The map of W: tiles of 16 rows, each a run of bytes, of which the rows of a block take `nbytes` at a time."""
    tiles, words = lay.tiles(rows), lay.tile_bytes(k) // 8
    return encoder(
        "float64", sizes=(1, tiles, words), strides=(tiles * words, words, 1), box=(1, block_rows // ROWS, nbytes // 8),
        swizzle=0, promotion=256,
    )  # fmt: skip
