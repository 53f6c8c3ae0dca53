"""How quant/integers/many.cu is launched: many rows of x, in tiles, in the formats that wide.cu does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...driver.kernel import Bound, ints
from ...driver.nvrtc import function_of
from ...gemm.model import H200, Gpu, together
from ..case import QuantCase
from ..layout import ROWS, STEP, PackedLayout, layout, macros
from . import activations

SHARED = 224 * 1024


class ManyCodes(NamedTuple):
    """How quant/integers/many.cu shares out many rows of x."""

    # tiles_w, tiles_x: a warp's tiles of 16 rows of W and of 8 rows of x
    tiles_w: int
    tiles_x: int
    # warps_w, warps_x: warps along both
    warps_w: int
    warps_x: int
    # stages, span: stages of the ring, and K of a stage
    stages: int
    span: int = 256
    blocks: int = 1  # of a multiprocessor at once

    @property
    def producer(self) -> bool:
        """Whether a warp of its own fills the ring: where its many copies for a stage take less than the sums do."""
        return 8 * self.tiles_x * self.warps_x >= 128

    def form(self, lay: PackedLayout) -> str:
        """The form of the codes of x that it takes."""
        return "words"

    def bind(self, case: QuantCase, device: int) -> Bound:
        """``launch(stream, w, codes, scales, sums, out, bias)``."""
        (m, n, k), lay = (case.m, case.n, case.k), layout(case.format)
        defines: dict[str, object] = {
            **macros(lay), "SUMS": activations.sums_kind(lay), "TYPES": case.types, "STAGES": self.stages,
            "SPAN_K": self.span, "MI": self.tiles_w, "NJ": self.tiles_x, "WARPS_M": self.warps_w,
            "WARPS_N": self.warps_x, "BLOCKS": self.blocks, "PRODUCER": self.producer,
        }  # fmt: skip
        made = function_of("quant/integers/many.cu", "quant_int_many", device, defines)
        tiles = -(-n // (ROWS * self.tiles_w * self.warps_w)) * -(-m // (8 * self.tiles_x * self.warps_x))
        return made.bind(
            [*["ptr"] * 6, *case.steps, *ints(m, n, k)], grid=(tiles, 1),
            block=(32 * self.warps_w * self.warps_x + (128 if self.producer else 0),),
            shared=self.stages * stage_bytes(lay, self), pdl=True,
        )  # fmt: skip


# A model of the time, fitted to 288 timings of 48 products in Q6_K on an H200: us to 256 of K, of a tile by itself and
# of each of a multiprocessor's tiles, some of which are there at once.
COSTS = {
    (1, 4, 8, 1): (2.03, 1.32), (2, 8, 4, 1): (0.39, 2.99), (2, 8, 4, 2): (0.88, 4.27), (1, 8, 4, 1): (1.92, 1.22),
    (1, 4, 4, 1): (1.72, 0.75), (1, 8, 4, 2): (0.28, 2.27),
}  # fmt: skip
START, CODES, MEMORY = 3.4, 2.9e5, 280.0  # as in `wide`


def options(lay: PackedLayout, m: int, n: int, k: int, gpu: Gpu = H200) -> Iterator[tuple[float, ManyCodes]]:
    """Configurations, each with as deep a ring as there is room for, and the microseconds to expect."""
    for shape, (alone, each) in COSTS.items():
        fit = SHARED // stage_bytes(lay, ManyCodes(*shape, 1))
        c = ManyCodes(*shape, max(2, min(3, fit)))
        tiles = -(-n // (ROWS * c.tiles_w * c.warps_w)) * -(-m // (8 * c.tiles_x * c.warps_x))
        walks = -(-k // 256) * together(alone, each * -(-tiles // gpu.multiprocessors))
        yield START + m * k / CODES + together(walks, lay.nbytes(n, k) / (MEMORY * gpu.memory)), c


def stage_bytes(lay: PackedLayout, c: ManyCodes) -> int:
    """Bytes of a buffer of quant/integers/many.cu."""
    rows, chunks = 8 * c.tiles_x * c.warps_x, c.span // STEP
    weights = c.tiles_w * c.warps_w * (c.span // lay.record_k) * lay.record_bytes
    kind, per_span = activations.sums_kind(lay), max(1, c.span // lay.format.block)
    sums = per_span * rows * (8 if kind == activations.FLOAT else 4)
    if kind == activations.PAIRS:
        sums += c.span // lay.format.sub // 2 * rows * 4
    return -(-(weights + chunks * STEP * rows + sums) // 128) * 128
