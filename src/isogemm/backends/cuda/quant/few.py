"""Products of a few rows with quantized weights, dequantized in registers: ``tensor_core:sm90/chain`` of W in x's type.

The bits are those of ``x @ W.T`` under that contract, W the float32 weights rounded once to bfloat16 or float16: K
ascends in steps of 16 into one accumulator. How a multiprocessor shares out the rows of W does not reach the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....base.dtypes import CODE
from ....errors import LayoutError, LimitError
from ..driver import facts
from ..driver.nvrtc import function_of
from .case import QuantCase
from .kernel import Launch, RoundedKernel
from .layout import ROWS, PackedLayout, layout, macros

__all__ = ["KERNEL", "MOST", "FewConfig", "configure"]

MOST = 32  # rows of x
SHARED = 227 * 1024  # bytes of dynamic shared memory that a block may have
WARPS = 17  # of a block
TILES = 16  # that a block walks at once


@dataclass(frozen=True, slots=True)
class FewConfig:
    """How a multiprocessor shares out the work; nothing here reaches the bits.

    Attributes
    ----------
    whole, split : int
        Tiles of 16 rows of W that a block walks at once: with a warp each, and with two warps, of eight rows each.
    chunk, stages : int
        K of a buffer of a tile's ring, and buffers.
    xstages : int
        Chunks of x that fit; 0: all of it, which is brought once.
    part : int
        K for which code is unrolled.
    """

    whole: int
    split: int
    chunk: int
    stages: int = 2
    xstages: int = 0
    part: int = 256

    @property
    def warps(self) -> int:
        """Of a block, without the one that brings chunks of x."""
        return self.whole + 2 * self.split

    @property
    def threads(self) -> int:
        """Of a block."""
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


def configure(lay: PackedLayout, m: int, n: int, k: int, multiprocessors: int) -> FewConfig:
    """The configuration for a product: one for all rows of x that make as many tiles of 8, and one for a row alone."""
    m = m if m == 1 else -(-m // 8) * 8
    each = _tiles(-(-lay.tiles(n) // multiprocessors))
    # Measured on an H200, n from 2560 to 28672, k from 2560 to 14336, m from 1 to 32. Few tiles: what takes long is a
    # warp's chain, and its waits where parts and chunks end. Many: long parts pay where their code is short, for there
    # are three kinds of warps, each with its own.
    few = each <= 4
    short = lay.floats_each == 1 and not lay.ints_each and lay.bits <= 5
    split, part = _split(each), 512 if few or short else 256
    chunks = (1024, 512, 256) if each <= 2 or (few and m <= 8) else (512, 256) if few or lay.bits < 8 else (256,)
    alone = (0, 4, 2) if few or short else (2, 0)  # where x is read while something else is done, it costs nothing
    found = (
        FewConfig(each - split, split, chunk, 2, xstages, min(part, chunk))
        for chunk in chunks
        for xstages in (alone if m == 1 else (2,) if chunk == 1024 else (4, 2))
    )
    return next(c for c in found if c.shared(lay, m, k) <= SHARED)


def _split(tiles: int) -> int:
    """Of a multiprocessor's tiles, those with two warps: its quarters get equal shares, and none stays without work."""
    return tiles if tiles <= 4 else tiles % 4 % 3


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

    name = "quant few"

    def takes(self, case: QuantCase) -> bool:
        return case.m <= MOST and case.n < 2**31 - ROWS and super().takes(case)

    def configure(self, case: QuantCase, multiprocessors: int) -> FewConfig:
        return configure(layout(case.format), case.m, case.n, case.k, multiprocessors)

    def tile(self, config: FewConfig) -> int:
        return 8

    def check(self, case: QuantCase) -> None:
        if case.m > MOST:
            raise LimitError("rows of a product of few rows", limit=f"0 to {MOST}", value=case.m, nearest=MOST)
        if case.dtype_bias is not None and case.bias_stride != 1 and case.n > 1:
            raise LayoutError("bias", limit="contiguous", value=case.bias_stride, nearest="bias.contiguous()")
        super().check(case)

    def build(self, case: QuantCase, config: FewConfig | None, device: int) -> Launch:
        on, lay, (m, n, k) = facts.device(device), layout(case.format), (case.m, case.n, case.k)
        chosen = config or configure(lay, m, n, k, on.multiprocessors)
        defines: dict[str, object] = {
            **macros(lay), "KIND": CODE[case.dtype], "OUT": CODE[case.dtype_out], "BIAS_KIND": case.bias_kind,
            "LOW": m <= 8, "NT": -(-m // 16), "CHUNK": chosen.chunk, "PART": chosen.part, "HOLD": chosen.xstages == 0,
            "WHOLE": chosen.whole > 0, "THREADS": 32 * WARPS,
        }  # fmt: skip
        made = function_of("quant/few.cu", "quant_few", device, defines)
        counts = (m, n, k, chosen.whole, chosen.split, chosen.stages, max(chosen.xstages, 1))
        return made.bind(
            [*["ptr"] * 4, ("i64", case.x[0]), ("i64", case.out[0]), *[("i32", x) for x in counts]],
            grid=(min(on.multiprocessors, lay.tiles(n)),), block=(chosen.threads,), shared=chosen.shared(lay, m, k),
            pdl=True,
        )  # fmt: skip


KERNEL = QuantFew()
