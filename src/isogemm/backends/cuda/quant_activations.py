"""Activations to 8-bit codes on the device, with the bits of `isogemm.contract.int32.quantize_activations`.

The codes lie in the order in which the integer products take them, see kernels/quant_activations.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .driver import Bound
from .fp32 import KINDS
from .quant_layout import STEP, Layout
from .quant_operands import compiled

__all__ = ["Places", "bind", "macros", "places", "sums_kind"]

WARPS = 4  # of a block, each with SPAN elements of a row
SPAN = 256
# Of a word of codes, from the words of K 0 to 7 and of K 8 to 15: bytes K = 2 t + (0, 8, 1, 9), for even and odd t.
ORDER = {"ORDER_EVEN": 0x5140, "ORDER_ODD": 0x7362}
MAGIC, FLOAT, ZERO, PAIRS = 1, 2, 3, 4


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
    """What products want of sums of codes: SUMS of kernels/quant_activations.cu."""
    if lay.format.block == SPAN:
        return PAIRS if lay.format.offset else ZERO
    return FLOAT if lay.format.offset else MAGIC


def macros(lay: Layout) -> dict[str, object]:
    """Of the codes of activations for weights in a layout."""
    return {"BLOCK": lay.format.block, "SUB": lay.format.sub, "SUMS": sums_kind(lay), "ZERO": lay.zero, **ORDER}


def places(lay: Layout, m: int, k: int) -> Places:
    """Where codes, scales and sums of x [m, k] lie in a workspace."""
    rows, steps = -(-m // 8) * 8, -(-k // STEP)
    codes = rows * steps * STEP
    if lay.format.block != SPAN:
        return Places(0, codes, codes, codes + 16 * steps * rows)
    blocks = k // SPAN
    subs = k // lay.format.sub // (2 if sums_kind(lay) == PAIRS else 1)
    sums = codes + -(-4 * blocks * rows // 128) * 128
    return Places(0, codes, sums, sums + 4 * subs * rows)


def bind(lay: Layout, m: int, k: int, dtype: str, strides: Sequence[int], align: int, device: int) -> Bound:
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
    """
    kind = KINDS[dtype]
    row, column = strides
    size = 4 if kind == 0 else 2
    vector = column == 1 and align % 16 == 0 and (row * size % 16 == 0 or m == 1)
    made = compiled("quant_activations", device, **macros(lay), TYPE=kind, VEC=vector)
    return made.bind(
        ["ptr", ("i64", row), ("i64", column), "ptr", "ptr", "ptr", ("i32", m), ("i32", k)],
        grid=(-(-m * -(-k // SPAN) // WARPS),), block=(32 * WARPS,), pdl=True,
    )  # fmt: skip
