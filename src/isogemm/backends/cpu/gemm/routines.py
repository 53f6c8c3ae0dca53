"""Compiled routines behind addresses.

Numba compiles a callee anew into every caller. The vector routines are large, so each is compiled once, on its first
use, and called through its address, which descriptors carry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from ..emit.entries import address_of, of_words
from ..emit.vectors import FLOAT32, Code
from .gemv import gemv_groups, gemv_tile
from .micro import HALF, NR, tile
from .pack import pack_lines
from .panels import panel_strips
from .quads import quad_strips
from .stream import stream_rows

# What emits the code of each kind, for a type of elements of B (of the packed operand for ``pack``). All but ``pack``
# have ten words.
_CODE: dict[str, Callable[[int], Code]] = {
    "tile_packed": partial(tile, NR, packed=True),
    "tile_direct": partial(tile, NR, packed=False),
    "half_packed": partial(tile, HALF, packed=True),
    "half_direct": partial(tile, HALF, packed=False),
    "pack": pack_lines,
    "gemv": gemv_tile,
    "gemv_groups": gemv_groups,
    "quads": quad_strips,
    "panels": panel_strips,
    "stream": stream_rows,
}
made: set[str] = set()
"""Kinds of routines for float32 that this process has."""


@cache
def routine(kind: str, element: int) -> int:
    """Address of a routine for one type of elements."""
    function, count = (_seven, 7) if kind == "pack" else (_ten, 10)
    address = address_of(function(list(_CODE).index(kind), element), of_words(count), emitted=True)
    if element == FLOAT32:
        made.add(kind)
    return address


@intrinsic(prefer_literal=True)
def _emitted(typingctx, kind, element, *words):
    """The code of a kind of routine; its number and the type of elements are constants."""
    code = list(_CODE.values())[kind.literal_value](element.literal_value)

    def codegen(context, builder, signature, args):
        code(builder, cgutils.unpack_tuple(builder, args[2]))

    return types.void(kind, element, types.UniTuple(types.int64, len(words))), codegen


def _seven(kind: int, element: int) -> Callable[..., Any]:
    def routine(a, b, c, d, e, f, g):
        _emitted(kind, element, a, b, c, d, e, f, g)

    return routine


def _ten(kind: int, element: int) -> Callable[..., Any]:
    def routine(a, b, c, d, e, f, g, h, i, j):
        _emitted(kind, element, a, b, c, d, e, f, g, h, i, j)

    return routine
