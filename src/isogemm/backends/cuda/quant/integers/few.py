"""How quant/integers/few.cu is launched: a few rows of x, of which every block has all, and W as a stream."""

from __future__ import annotations

from typing import NamedTuple

from ...driver.kernel import Bound, Parameter, ints, longs
from ...driver.nvrtc import function_of
from ...gemm.model import Gpu, together
from ..case import QuantCase
from ..layout import ROWS, STEP, PackedLayout, layout, macros
from . import activations

MULTIPROCESSORS = 132  # of an H200; sizes teams and rings, nothing else
SHARED = 224 * 1024
BLOCK = 227 * 1024  # bytes of shared memory that a block may have, what the kernel declares included
WARPS = 14  # of a block, at most
FUSED = 1  # rows of x up to which every block makes its own codes


class FewCodes(NamedTuple):
    """How quant/integers/few.cu shares out few rows of x."""

    tiles: int  # of 8 rows of x
    # group, teams, stages, span: warps of a team, teams of a block, stages of a warp's ring, K of a stage
    group: int
    teams: int
    stages: int
    span: int = 256
    # where the codes of x are: in "memory", "staged" in shared memory, or made there by every block: "fused"
    x: str = "memory"
    rows: int = 0  # of x, which a fused kernel is compiled for; 0 for any
    split: int = 0  # teams that are two, each with half of the tiles of x; only where x is "staged"
    each: int = 0  # rows of x of a part, where blocks side by side have different ones; 0: all of them

    def ring(self, lay: PackedLayout) -> int:
        """Bytes of shared memory for weights."""
        return self.group * self.teams * self.stages * (self.span // lay.record_k) * lay.record_bytes

    @property
    def declared(self) -> int:
        """Bytes of shared memory that the kernel declares: barriers, where chains are handed on, who has read what."""
        chains = 512 * self.tiles * self.teams if self.group > 1 else 0
        read = 4 * max(1, self.group * self.split * self.stages)
        return -(-(8 * self.group * self.teams * self.stages + chains + read + 32) // 128) * 128

    def form(self, lay: PackedLayout) -> str:
        """The form of the codes of x that it takes; "" where it makes them itself."""
        return "" if self.x == "fused" else form_of(lay)

    def bind(self, case: QuantCase, device: int) -> Bound:
        """``launch(stream, w, codes, scales, sums, out, bias)``, or, "fused", ``launch(stream, w, x, out, bias)``."""
        (m, n, k), lay = (case.m, case.n, case.k), layout(case.format)
        fused, each = self.x == "fused", self.each or m
        parts: list[Parameter] = []
        if not fused:
            parts = [("i32", each), ("i64", activations.places(lay, each, k, form_of(lay)).nbytes)]
        x: list[Parameter] = longs(*case.x) if fused else ["ptr", "ptr"]
        defines: dict[str, object] = {
            **macros(lay), "SUMS": activations.sums_kind(lay), "TYPES": case.types, "STAGES": self.stages,
            "SPAN_K": self.span, "NT": self.tiles, "SPLIT": self.split, "GROUP": self.group, "TEAMS": self.teams,
            "EACH": 2 if m == 1 else 1, "FIXED": -(-each // 8) == self.tiles, "STAGED": self.x == "staged",
            "FUSED": m * fused, **(activations.reading(case) if fused else {}),
        }  # fmt: skip
        made = function_of("quant/integers/few.cu", "quant_int", device, defines)
        return made.bind(
            ["ptr", "ptr", *x, "ptr", "ptr", *case.steps, *ints(m, n, k), *parts],
            grid=(-(-n // (ROWS * self.teams)), -(-each // (8 * self.tiles)), -(-m // each)),
            block=(32 * self.group * (self.teams + self.split),), shared=self.ring(lay) + x_bytes(lay, each, k, self.x),
            pdl=True,
        )  # fmt: skip


def form_of(lay: PackedLayout) -> str:
    """Scales of x as float16, where they are."""
    return "halves" if lay.record_k == STEP else "words"


def usual(lay: PackedLayout, m: int, n: int, k: int, multiprocessors: int = MULTIPROCESSORS) -> FewCodes | None:
    """Warps to keep a multiprocessor busy; x where it can be read fastest. None where `ManyCodes` are faster."""
    tiles, spans, wide = -(-n // ROWS), max(1, -(-k // 256)), -(-m // 8)
    each = -(-tiles // multiprocessors)  # tiles of W of a multiprocessor
    kept = "fused" if m <= FUSED else "staged"
    codes = x_bytes(lay, m, k, kept)
    for span, x in ((256, kept), (128, kept), (256, "memory")):
        group = 1 if each > 6 else min(4 if m == 1 and spans <= 16 else 8, spans, 12 // each)
        teams = -(-each // -(-each // min(each, WARPS // group)))
        # One or two teams more than a multiprocessor's four schedulers divide are halved.
        split = teams % 4 if group == 1 and x == "staged" and wide % 2 == 0 and teams % 4 < 3 else 0
        c = FewCodes(wide, group, teams, 1, span, x, m if x == "fused" else 0, split)
        if x == "memory":
            return None if wide > 2 else c._replace(stages=max(2, min(SHARED // 2 // c.ring(lay), 4)))
        most = min((SHARED - codes) // c.ring(lay), 1024 // span) if k and span >= lay.record_k else 0
        for found in (c._replace(stages=stages) for stages in range(most, 1, -1)):
            if found.ring(lay) + found.declared + codes <= BLOCK:
                return found
    return None


# A model of the time, fitted to 592 timings of 220 products on an H200, in us to 256 of K, for each tile of 8 rows of
# x: of a warp, of the chain, and of each of a multiprocessor's teams one after the other, which take the last number
# besides.
# By blocks of 32 of up to 5 bits and of 8, super-blocks with sub-blocks of 32 and of 16.
COSTS = (
    (0.23, 0.091, 0.038, 0.024), (0.20, 0.091, 0.042, 0.030), (0.129, 0.001, 0.026, 0.046), (0.14, 0.001, 0.031, 0.062),
)  # fmt: skip
START, CODES = 3.5, 9.2e5  # of both launches; values of x a us that become codes
MEMORY, CACHE = 1040.0, 21000.0  # bytes a us, as in quant/many.py
UNSTAGED = 1.2  # what it takes longer where x is read from memory


def microseconds(lay: PackedLayout, c: FewCodes, m: int, n: int, k: int, gpu: Gpu) -> float:
    """The time to expect where codes of x are made first."""
    kind = 3 if lay.format.sub == 16 else 2 if lay.record_k > STEP else 1 if lay.bits > 5 else 0
    warp, chain, tile, team = COSTS[kind]
    each = c.each or m
    blocks = -(-lay.tiles(n) // c.teams) * -(-m // each)
    teams = c.teams * -(-blocks // gpu.multiprocessors)
    spans = -(-k // 256)
    step = together(warp * c.tiles / c.group, chain * c.tiles, teams * (team + tile * c.tiles))
    walks = (spans * step + warp * c.tiles) * (UNSTAGED if c.x == "memory" else 1)
    cached = blocks * x_bytes(lay, each, k, c.x) / (CACHE * gpu.multiprocessors)
    return START + m * k / CODES + together(walks, cached, lay.nbytes(n, k) / (MEMORY * gpu.memory))


def x_bytes(lay: PackedLayout, m: int, k: int, x: str) -> int:
    """Bytes of shared memory of codes, scales and sums of x."""
    if x == "memory":
        return 0
    places = activations.places(lay, m, k, form_of(lay))
    if x == "staged":
        return places.nbytes + 128
    scales = places.nbytes - places.scales  # and sums, of 8 rows
    return -(-k // STEP) * STEP * m + (scales // 8 if m == 1 else scales) + 128
