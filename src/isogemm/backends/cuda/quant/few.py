"""Products of a few rows with quantized weights, dequantized in registers: ``tensor_core:sm90/chain`` of W in x's type.

The bits are those of ``x @ W.T`` under that contract, W the float32 weights rounded once to bfloat16 or float16: K
ascends in steps of 16 into one accumulator. How a multiprocessor shares out the rows of W does not reach the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ....base.dtypes import CODE
from ....errors import LayoutError
from ..driver import facts
from ..driver.kernel import ints, longs
from ..driver.nvrtc import function_of
from ..gemm.model import H200, Gpu, gpu_of, together
from .case import QuantCase
from .kernel import Launch, RoundedKernel, filling, work_of
from .layout import ROWS, STEP, PackedLayout, layout, macros

SHARED = 227 * 1024  # bytes of dynamic shared memory that a block may have
WARPS = 17  # of a block
TILES = 16  # that a block walks at once
NARROW = 4  # tiles of a multiprocessor, up to which all have two warps


@dataclass(frozen=True, slots=True)
class FewConfig:
    """How a multiprocessor shares out the work; nothing here reaches the bits."""

    # whole, split: tiles of 16 rows of W that a block walks at once: with a warp each, and with two, of eight rows each
    whole: int
    split: int
    # chunk, stages: K of a buffer of a tile's ring, and buffers
    chunk: int
    stages: int = 2
    xstages: int = 0  # chunks of x that fit; 0: all of it, which is brought once
    part: int = 256  # K for which code is unrolled

    @property
    def warps(self) -> int:
        """Warps of a block, without the one that brings chunks of x."""
        return self.whole + 2 * self.split

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + (self.xstages > 0))

    def shared(self, lay: PackedLayout, m: int, k: int) -> int:
        """Bytes of dynamic shared memory of a block, as the kernel cuts it up."""
        tiles = self.whole + self.split
        barriers = 16 * (tiles * self.stages + max(self.xstages, 1))
        ring = self.stages * (self.chunk // lay.record_k) * lay.record_bytes
        # A row's 16 bytes more put eight rows into different banks.
        x = self.xstages * m * (2 * self.chunk + 16) if self.xstages else m * (2 * k + 16)
        # Operands are loaded for 64 of K at once: a last half of that reads on.
        return -(-barriers // 128) * 128 + tiles * ring + x + 48


# A model of the time, fitted to timings of 191 drawn products on an H200, in us to 64 of K. What a chain waits, and
# more with more than 8 and than 16 rows of x; what warps of eight rows of W, and of sixteen, keep a scheduler busy for,
# and as much again for each 16 rows of x.
LATENCY, HALF, WHOLE = (0.0702, 0.0131, 0.0033), (0.0411, 0.0288), (0.0429, 0.0717)
START, SHARING = 1.45, 0.442  # of a launch, and of bringing more than a row of x
MEMORY, CACHE = 777.0, 18200.0  # bytes a us: for each GB/s of the bus; from the second-level cache, by multiprocessor
# Rings of W and of x, (chunk, stages, xstages), the fastest first, of few tiles to a multiprocessor and of more.
SHORT, LONG, MORE = (
    ((256, 8, 8),),
    ((1024, 3, 2), (1024, 2, 2), (512, 3, 4), (512, 2, 4), (512, 2, 2)),
    ((512, 2, 4), (512, 2, 2), (256, 2, 4), (256, 2, 2)),
)


@lru_cache(maxsize=4096)
def configure(lay: PackedLayout, m: int, n: int, k: int, multiprocessors: int) -> FewConfig:
    """The configuration for a product: one for all rows of x that make as many tiles of 8, and one for a row alone."""
    gpu = H200._replace(multiprocessors=multiprocessors)
    m = m if m == 1 else -(-m // 8) * 8
    return min(_options(lay, m, n, k, multiprocessors), key=lambda c: expected(lay, c, m, n, k, gpu))


def _options(lay: PackedLayout, m: int, n: int, k: int, multiprocessors: int) -> Iterator[FewConfig]:
    """More than one tile to a block is often better."""
    least = -(-lay.tiles(n) // multiprocessors)
    several = (least, 2, NARROW) if least <= NARROW else (_tiles(least),)
    for each in sorted({x for x in several if x >= min(least, TILES)}):
        yield _filled(lay, each, m, k)


def _filled(lay: PackedLayout, each: int, m: int, k: int) -> FewConfig:
    """The configuration with the best rings that there is room for."""
    # Measured on an H200, n from 2560 to 28672, k from 2560 to 14336, m from 1 to 32. Few tiles: what takes long is a
    # warp's chain, and its waits where parts and chunks end. Many: long parts pay where their code is short, for there
    # are three kinds of warps, each with its own.
    few = each <= NARROW
    short = lay.floats_each == 1 and not lay.ints_each and lay.bits <= 5
    split, part = _split(each), 512 if few or short else 256
    rings = [*SHORT, *LONG, *MORE] if few and k <= 1024 else [*LONG, *MORE] if few else list(MORE)
    if not few and lay.bits >= 8:
        rings = [ring for ring in rings if ring[0] == 256]
    if m == 1 and (few or short):  # where x is read while something else is done, it costs nothing
        rings = [(chunk, 2, 0) for chunk in ((1024, 512, 256) if few else (512, 256))] + rings
    whole = each - split
    found = (FewConfig(whole, split, chunk, w, x, min(part, chunk)) for chunk, w, x in rings)
    return next(c for c in found if c.shared(lay, m, k) <= SHARED)


def expected(lay: PackedLayout, c: FewConfig, m: int, n: int, k: int, gpu: Gpu) -> float:
    """A model: a warp's chain, a scheduler's warps one after the other, x out of the cache, weights from memory."""
    blocks, wide, work = -(-lay.tiles(n) // (c.whole + c.split)), -(-m // 16), work_of(lay)
    waves, steps = -(-blocks // gpu.multiprocessors), -(-k // STEP)
    busy = -(-c.split // 2) * (HALF[0] * work + HALF[1] * wide) + -(-c.whole // 4) * (WHOLE[0] * work + WHOLE[1] * wide)
    waits = LATENCY[0] + LATENCY[1] * (m > 8) + LATENCY[2] * (wide - 1)
    cached = min(blocks, gpu.multiprocessors) * 2 * m * k / (CACHE * gpu.multiprocessors)
    moved = lay.nbytes(n, k) / (MEMORY * gpu.memory)
    return START + SHARING * (m > 1) + together(waves * steps * together(waits, busy), cached, moved)


def _split(tiles: int) -> int:
    """How many of a multiprocessor's tiles have two warps: its quarters get equal shares, and all have work."""
    return tiles if tiles <= NARROW else tiles % 4 % 3


def _tiles(each: int) -> int:
    """Tiles at once of a multiprocessor that has so many: all, or what keeps its busiest quarter least busy."""
    if each <= TILES:
        return each

    def time(tiles: int) -> float:
        passes, rest = divmod(each, tiles)
        return passes * ((tiles - _split(tiles) + 3) // 4 + 0.5 * (_split(tiles) > 0)) + (rest + 3) // 4

    return min(range(TILES, TILES // 2, -1), key=time)


class QuantFew(RoundedKernel):
    """x of bfloat16 or float16, up to 32 rows, contiguous and beginning at multiples of 16 bytes."""

    name, most = "quant few", 32

    def takes(self, case: QuantCase) -> bool:
        return case.n < 2**31 - ROWS and super().takes(case)

    def configure(self, case: QuantCase, multiprocessors: int) -> FewConfig:
        return configure(layout(case.format), case.m, case.n, case.k, multiprocessors)

    def microseconds(self, case: QuantCase, config: FewConfig, device: int) -> float:
        return expected(layout(case.format), config, case.m, case.n, case.k, gpu_of(device))

    def tile(self, config: FewConfig) -> int:
        return 8

    def check(self, case: QuantCase) -> None:
        if case.dtype_bias is not None and case.bias_stride != 1 and case.n > 1:
            raise LayoutError("bias", limit="contiguous", value=case.bias_stride, nearest="bias.contiguous()")
        super().check(case)

    def build(self, case: QuantCase, config: FewConfig, device: int) -> Launch:
        on, lay, (m, n, k) = facts.device(device), layout(case.format), (case.m, case.n, case.k)
        defines: dict[str, object] = {
            **macros(lay), "KIND": CODE[case.dtype], "OUT": CODE[case.dtype_out], "BIAS_KIND": case.bias_kind,
            "LOW": m <= 8, "NT": -(-m // 16), "CHUNK": config.chunk, "PART": config.part,
            "HOLD": config.xstages == 0, "WHOLE": config.whole > 0, "THREADS": 32 * WARPS,
        }  # fmt: skip
        across = filling(-(-lay.tiles(n) // (config.whole + config.split)), on.multiprocessors)
        made = function_of("quant/few.cu", "quant_few", device, defines)
        counts = (m, n, k, config.whole, config.split, config.stages, max(config.xstages, 1))
        return made.bind(
            [*["ptr"] * 4, *longs(case.x[0], case.out[0]), *ints(*counts)],
            grid=(across,), block=(config.threads,), shared=config.shared(lay, m, k), pdl=True,
        )  # fmt: skip


KERNEL = QuantFew()
