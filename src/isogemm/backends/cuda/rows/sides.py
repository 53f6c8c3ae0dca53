"""Where the rows of operands lie, as the kernels along rows take it, and what of them can be read at once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ....base.dtypes import TYPES

DIMENSIONS = 4  # leading ones that a kernel counts


class Side(NamedTuple):
    """An operand."""

    kind: int  # the element type's code in `isogemm.base.dtypes`; -1 where there is none
    steps: tuple[int, ...] = ()  # along the leading dimensions, in elements
    column: int = 1  # along the last one


ABSENT = Side(-1)


def size_of(kind: int) -> int:
    """Bytes of an element of that code."""
    return TYPES[kind].dtype.itemsize


def dimensions_of(extents: Sequence[int]) -> int:
    """How many leading dimensions compiled code counts, for those that are left."""
    return 1 if len(extents) <= 1 else DIMENSIONS


def collapse(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Dimensions that one step passes through in all operands become one; extents of 1 go."""
    extents: list[int] = []
    kept: list[list[int]] = [[] for _ in steps]
    for i, extent in enumerate(shape):
        if extent == 1:
            continue
        if extents and all(k[-1] == s[i] * extent for k, s in zip(kept, steps, strict=True)):
            extents[-1] *= extent
            for k, s in zip(kept, steps, strict=True):
                k[-1] = s[i]
            continue
        extents.append(extent)
        for k, s in zip(kept, steps, strict=True):
            k.append(s[i])
    return extents, kept


def packed(rows: int, extents: Sequence[int], steps: Sequence[Sequence[int]]) -> bytes:
    """The kernels' Place: rows, the last three extents of four and how to divide by them, steps of three operands."""
    missing = DIMENSIONS - len(extents)
    inner = [(extent, *divider(extent)) for extent in ([1] * missing + list(extents))[1:]]
    shifts = sum(shift << 8 * k for k, (_, _, shift) in enumerate(inner))
    numbers = [x for extent, factor, _ in inner for x in (extent, factor)]
    every = [list(s) for s in steps] + [[0] * len(extents)] * (3 - len(steps))
    flat = [x for s in every for x in [0] * missing + s]
    return struct.pack("<8I12q", rows, shifts, *numbers, *flat)


def divider(extent: int) -> tuple[int, int]:
    """(factor, shift): ``n // extent == (n + (n * factor >> 32)) >> shift`` for every n below 2**31."""
    shift = (max(extent, 1) - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - max(extent, 1)) // max(extent, 1) + 1), shift


def whole(sides: Sequence[Side], shape: Sequence[int], n: int, count: int, align: int) -> bool:
    """Whether `count` neighbours of each operand can be read at once, 16 bytes at most.

    `shape` are the leading dimensions, `align` a power of two that divides every address.
    """
    if n % count:
        return False
    for side in sides:
        if side.kind < 0:
            continue
        unit = min(16, size_of(side.kind) * count)
        steps = [s for s, extent in zip(side.steps, shape, strict=False) if extent > 1]
        if align % unit or (side.column != 1 and n > 1) or any(s * size_of(side.kind) % unit for s in steps):
            return False
    return True
