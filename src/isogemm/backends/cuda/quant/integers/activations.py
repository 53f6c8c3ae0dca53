"""Activations to 8-bit codes on the device, with the bits of `isogemm.contract.int32.quantize_activations`.

They lie in the order in which a product takes them, which is one of three forms: ``words`` and ``halves`` (scales as
float16, of blocks of 32 alone), see quant/integers/code_steps.cu, or ``float16``, see quant/integers/codes_wide.cu.
"""

from __future__ import annotations

from typing import NamedTuple

from .....base.dtypes import CODE, ITEMSIZE
from ...driver.kernel import Bound, Parameter, ints, longs
from ...driver.nvrtc import function_of
from ..case import QuantCase
from ..layout import STEP, PackedLayout, layout

WARPS = 4  # of a block, each with SPAN elements of a row
SPAN = 256
NONE, FLOAT, PAIRS = 0, 2, 4


class Places(NamedTuple):
    """Bytes from the start of a workspace to codes, scales and sums, and of all of it."""

    codes: int
    scales: int
    sums: int
    nbytes: int

    def at(self, base: int) -> tuple[int, int, int]:
        """Addresses, of a workspace at `base`."""
        return base + self.codes, base + self.scales, base + self.sums


def sums_kind(lay: PackedLayout) -> int:
    """What products want of sums of codes: SUMS of quant/integers/code_steps.cu."""
    if not lay.format.offset:
        return NONE
    return PAIRS if lay.format.block == SPAN else FLOAT


def places(lay: PackedLayout, m: int, k: int, form: str) -> Places:
    """Where codes, scales and sums of x [m, k] lie in a workspace."""
    kind = sums_kind(lay)
    if form == "float16":
        lines = -(-k // lay.format.block) * (2 if kind == FLOAT else 1)
        scales = -(-2 * m * k // 128) * 128
        sums = scales + -(-4 * lines * -(-m // 16) * 16 // 128) * 128
        return Places(0, scales, sums, sums + (2 * m * (k // 16) if kind == PAIRS else 0))
    rows, steps, halves = -(-m // 8) * 8, -(-k // STEP), form == "halves"
    codes = rows * steps * STEP
    blocks = -(-steps * STEP // lay.format.block)
    scale = 2 if halves else 8 if kind == FLOAT else 4
    sums = codes + -(-scale * blocks * rows // 128) * 128
    words = blocks if halves and kind == FLOAT else k // lay.format.sub // 2 if kind == PAIRS else 0
    return Places(0, codes, sums, sums + 4 * words * rows)


def reading(case: QuantCase) -> dict[str, object]:
    """Macros that say how x is read."""
    row, column = case.x
    whole = row * ITEMSIZE[case.dtype] % 16 == 0 or case.m == 1
    return {"TYPE": CODE[case.dtype], "VEC": column == 1 and case.x_align == 16 and whole}


def bind(case: QuantCase, form: str, device: int, each: int = 0) -> Bound:
    """``launch(stream, x, codes, scales, sums)`` for x of a case; with `each`, in parts of so many rows."""
    fmt, kind = layout(case.format).format, sums_kind(layout(case.format))
    defines: dict[str, object] = {"BLOCK": fmt.block, "SUMS": kind, **reading(case)}
    if form == "float16":
        file, name, more = "codes_wide.cu", "quant_activations_wide", {"SUB": 16 if kind == PAIRS else 32}
    else:
        file, name, more = "activations.cu", "quant_activations", {"SUB": fmt.sub, "HALVES": form == "halves"}
    made = function_of(f"quant/integers/{file}", name, device, {**defines, **more})
    parts: list[Parameter] = []
    if form != "float16":
        rows = each or case.m
        parts = [("i32", rows), ("i64", places(layout(case.format), rows, case.k, form).nbytes)]
    return made.bind(
        ["ptr", *longs(*case.x), *["ptr"] * 3, *ints(case.m, case.k), *parts],
        grid=(-(-case.m * -(-case.k // SPAN) // WARPS),), block=(32 * WARPS,), pdl=True,
    )  # fmt: skip
