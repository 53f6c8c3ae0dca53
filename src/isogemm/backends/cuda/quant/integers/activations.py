"""Activations to 8-bit codes on the device, with the bits of `isogemm.contract.int32.quantize_activations`.

The codes lie in the order in which the integer products take them, see quant/integers/activations.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...driver.kernel import Bound
from ...gemm.fp32 import KINDS
from ..layout import STEP, Layout
from ..operands import compiled

__all__ = ["Places", "bind", "macros", "places", "reading", "sums_kind"]

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


def sums_kind(lay: Layout) -> int:
    """What products want of sums of codes: SUMS of quant/integers/activations.cu."""
    if not lay.format.offset:
        return NONE
    return PAIRS if lay.format.block == SPAN else FLOAT


def macros(lay: Layout, halves: bool = False) -> dict[str, object]:
    """Of the codes of activations for weights in a layout; `halves` asks for scales as float16, blocks of 32 alone."""
    return {"BLOCK": lay.format.block, "SUB": lay.format.sub, "SUMS": sums_kind(lay), "HALVES": halves}


def places(lay: Layout, m: int, k: int, halves: bool = False) -> Places:
    """Where codes, scales and sums of x [m, k] lie in a workspace."""
    rows, steps, kind = -(-m // 8) * 8, -(-k // STEP), sums_kind(lay)
    codes = rows * steps * STEP
    blocks = -(-steps * STEP // lay.format.block)
    scale = 2 if halves else 8 if kind == FLOAT else 4
    sums = codes + -(-scale * blocks * rows // 128) * 128
    words = blocks if halves and kind == FLOAT else k // lay.format.sub // 2 if kind == PAIRS else 0
    return Places(0, codes, sums, sums + 4 * words * rows)


def reading(dtype: str, strides: Sequence[int], align: int, m: int) -> dict[str, object]:
    """Macros that say how x is read."""
    size, (row, column) = 4 if dtype == "float32" else 2, strides
    vector = column == 1 and align % 16 == 0 and (row * size % 16 == 0 or m == 1)
    return {"TYPE": KINDS[dtype], "VEC": vector}


def bind(
    lay: Layout, m: int, k: int, dtype: str, strides: Sequence[int], align: int, device: int, halves: bool = False
) -> Bound:
    """``launch(stream, x, codes, scales, sums)`` for x [m, k].

    Parameters
    ----------
    lay : Layout
        Of the weights.
    dtype : str
        float32, bfloat16 or float16.
    strides : (int, int)
        Elements between rows and between columns of x.
    align : int
        Divides the address of x.
    device : int
    halves : bool
        See `macros`.
    """
    row, column = strides
    made = compiled(
        "integers/activations.cu",
        "quant_activations",
        device,
        **macros(lay, halves),
        **reading(dtype, strides, align, m),
    )
    return made.bind(
        ["ptr", ("i64", row), ("i64", column), "ptr", "ptr", "ptr", ("i32", m), ("i32", k)],
        grid=(-(-m * -(-k // SPAN) // WARPS),), block=(32 * WARPS,), pdl=True,
    )  # fmt: skip
