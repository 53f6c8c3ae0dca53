"""Compiled routines behind addresses.

Numba compiles a callee anew into every caller. The vector routines are large, so each is compiled once, on its first
use, and called through its address, which descriptors carry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from numba.core import types

from ..emit.entries import address_of
from ..emit.vectors import FLOAT32
from .gemv import gemv_groups, gemv_tile
from .micro import HALF, NR, tile
from .pack import pack_lines
from .panels import panel_strips
from .quads import quad_strips
from .stream import stream_rows

ARGUMENTS = {"pack": 7}  # of 64 bits; all others have 10
made: set[str] = set()
"""Kinds of routines for float32 that this process has."""


@cache
def routine(kind: str, element: int) -> int:
    """Address of a routine for one element type of B (of the packed operand for ``pack``)."""
    signature = types.void(*[types.int64] * ARGUMENTS.get(kind, 10))
    address = address_of(_MAKERS[kind](element), signature, emitted=True)
    if element == FLOAT32:
        made.add(kind)
    return address


def _tile(columns: int, packed: int, element: int) -> Callable[..., Any]:
    def register_tile(rows, k, a, a_rs, a_cs, b, b_rs, c, c_rs, flags):
        tile(columns, packed, element, rows, k, a, a_rs, a_cs, b, b_rs, c, c_rs, flags)

    return register_tile


def _pack(element: int) -> Callable[..., Any]:
    def pack(dst, step, src, line, k_stride, k, rows):
        pack_lines(element, dst, step, src, line, k_stride, k, rows)

    return pack


def _gemv(element: int) -> Callable[..., Any]:
    def gemv(rows, out, out_rs, x, x_rs, w, line, k, columns, load_c):
        gemv_tile(element, rows, out, out_rs, x, x_rs, w, line, k, columns, load_c)

    return gemv


def _gemv_groups(element: int) -> Callable[..., Any]:
    def groups(rest, groups, acc, x, x_rs, w, line, k, columns, unused):
        gemv_groups(element, rest, groups, acc, x, x_rs, w, line, k, columns)

    return groups


def _quads(element: int) -> Callable[..., Any]:
    def quads(rows, out, out_rs, x, x_rs, w, line, k, columns, load_c):
        quad_strips(element, rows, out, out_rs, x, x_rs, w, line, k, columns, load_c)

    return quads


def _panels(element: int) -> Callable[..., Any]:
    def panels(rows, out, out_rs, x, x_rs, w, k, columns, load_c, unused):
        panel_strips(element, rows, out, out_rs, x, x_rs, w, k, columns, load_c)

    return panels


def _stream(element: int) -> Callable[..., Any]:
    def stream(rows, deep, acc, acc_rs, x, x_rs, b, b_rs, columns, load_c):
        stream_rows(element, rows, deep, acc, acc_rs, x, x_rs, b, b_rs, columns, load_c)

    return stream


_MAKERS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "tile_packed": partial(_tile, NR, 1),
    "tile_direct": partial(_tile, NR, 0),
    "half_packed": partial(_tile, HALF, 1),
    "half_direct": partial(_tile, HALF, 0),
    "pack": _pack,
    "gemv": _gemv,
    "gemv_groups": _gemv_groups,
    "quads": _quads,
    "panels": _panels,
    "stream": _stream,
}
