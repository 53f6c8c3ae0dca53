"""Calls along rows as cases of kernels, for operands of one shape; a launch takes addresses, inputs first.

What reaches the bits is in the contract; here it is found out how operands lie, and what of them can be read at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....contract.rows import OPERATIONS
from ....errors import LimitError
from ..driver.kernel import Bound
from .code import RowsCase
from .kernels import serve
from .sides import ABSENT, DIMENSIONS, Side, collapse, dimensions_of, packed, size_of, whole

INTS = 2**31


def counted(what: str, value: int, limit: int = INTS) -> int:
    """`value`, if the kernels can count that far."""
    if value >= limit:
        raise LimitError(what, limit=f"fewer than {limit}", value=value, nearest=limit - 1)
    return value


def _spread(
    shape: Sequence[int], sides: Sequence[Side], sizes: Sequence[int], build: Callable[[int, bytes, int], Bound]
) -> Bound:
    """`build(rows, place, dimensions)`; where too many dimensions are left, a launch for each index of the first.

    `sides` are the operands whose rows count, `sizes` the bytes from one index to the next of every pointer of a launch
    that is none of theirs: outputs are dense.
    """
    rows = math.prod(shape)
    if not rows:
        shape, sides = (0,), [s._replace(steps=(0,)) for s in sides]
    extents, steps = collapse(shape, [s.steps if s.kind >= 0 else (0,) * len(shape) for s in sides])
    if len(extents) <= DIMENSIONS:
        return build(rows, packed(rows, extents, steps), dimensions_of(extents))
    inner = [s._replace(steps=tuple(k[1:])) if s.kind >= 0 else s for s, k in zip(sides, steps, strict=True)]
    part = rows // extents[0]
    below = _spread(extents[1:], inner, sizes, build)
    moves = [k[0] * size_of(s.kind) for s, k in zip(sides, steps, strict=True) if s.kind >= 0]
    moves += [size * part for size in sizes]

    def launch(stream: int, *at: int) -> None:
        for i in range(extents[0]):
            below(stream, *(a + i * m for a, m in zip(at, moves, strict=True)))

    return launch


def reduce(
    kind: str, shape: Sequence[int], n: int, sides: Sequence[Side], kinds: tuple[int, int], eps: float, align: int,
    device: int,
) -> Bound:  # fmt: skip
    """``launch(stream, x, other, weight, bias, out, second)`` of an operation whose rows have sums.

    Parameters
    ----------
    kind : str
        As `isogemm.contract.rows.OPERATIONS` names it.
    shape : sequence of int
        Leading dimensions.
    sides : (x, other, weight, bias)
    kinds : (int, int)
        Element codes of out and of second, -1 where there is none.
    align : int
        Divides every address.
    """
    x, other, weight, bias = sides
    widths = [n if result.width is None else result.width for result in OPERATIONS[kind].results]
    counted("rows", math.prod(shape))
    counted("elements of a row", n, INTS - 2**16)
    dense = OPERATIONS[kind].results[0].width is not None or align >= 4 * size_of(kinds[0])
    types = dict(zip(("TX", "TG", "TW", "TB"), (s.kind for s in sides), strict=True)) | {"TO": kinds[0]}

    def build(count: int, place: bytes, dimensions: int) -> Bound:
        case = RowsCase(
            (*(s.kind for s in sides), *kinds), (place,), tuple(s.column for s in sides), count, n, eps,
            macros={**types, "OP": kind.upper(), "DIMS": dimensions}, vector=dense and whole(sides, shape, n, 4, align),
        )  # fmt: skip
        return serve("rows", case, device)

    moves = [0 for s in (weight, bias) if s.kind >= 0]
    moves += [width * size_of(k) for width, k in zip(widths, kinds, strict=False) if k >= 0]
    return _spread(shape, (x, other), moves, build)


def loss(
    kind: str, shape: Sequence[int], n: int, sides: tuple[Side, Side, Side], out: int, ignore_index: int, align: int,
    device: int,
) -> Bound:  # fmt: skip
    """``launch(stream, x, dy, target, sums, out, second)`` of an operation whose rows have classes.

    Without what is absent: dy and sums are a gradient's, which has no second result.

    Parameters
    ----------
    sides : (x, dy, target)
        The steps of classes are in words of four bytes.
    out : int
        Element code of the loss, or of the gradient.
    """
    x, dy, _ = sides
    counted("rows", math.prod(shape))
    counted("elements of a row", n, INTS - 2**16)
    back = dy.kind >= 0
    types = {"TX": x.kind, "TG": dy.kind, "TW": -1, "TB": -1, "TO": out, "OP": kind.upper()}
    vector = (not back or align >= 4 * size_of(out)) and whole([x], shape, n, 4, align)

    def build(count: int, place: bytes, dimensions: int) -> Bound:
        case = RowsCase(
            (x.kind, dy.kind, 0, 0 if back else -1, out, -1 if back else 0), (place,), (x.column, 1, 1, ignore_index),
            count, n, macros={**types, "DIMS": dimensions}, vector=vector,
        )  # fmt: skip
        return serve("rows", case, device)

    return _spread(shape, sides, [8, n * size_of(out)] if back else [size_of(out), 8], build)


def each(
    kind: str, shape: Sequence[int], n: int, sides: Sequence[Side], outs: Sequence[int], align: int, device: int
) -> Bound:
    """``launch(stream, x, y, dy, out, second)`` of an operation of elements, without what is absent."""
    extents, steps = collapse(
        (*shape, n), [(*s.steps, s.column) if s.kind >= 0 else (0,) * (len(shape) + 1) for s in sides]
    )
    flat = len(extents) <= 1 and all(s.kind < 0 or (k or [1])[0] == 1 for s, k in zip(sides, steps, strict=True))
    if flat:
        n, shape = math.prod(extents) * (0 if 0 in (*shape, n) else 1), ()
        sides = [s._replace(steps=(), column=1) for s in sides]
    vector = whole(sides, shape, n, 8, align) and align >= 16
    types = dict(zip(("TX", "TG", "TD"), (s.kind for s in sides), strict=True)) | {"TO": outs[0], "OP": kind.upper()}
    counted("elements of a row", n)

    def build(count: int, place: bytes, dimensions: int) -> Bound:
        counted("elements of one operation", count * -(-n // (8 if vector else 1)))
        case = RowsCase(
            (*(s.kind for s in sides), *outs, -1)[:5], (place,), tuple(s.column for s in sides), count, n,
            macros={**types, "DIMS": dimensions}, vector=vector,
        )  # fmt: skip
        return serve("each", case, device)

    return _spread(shape, sides, [n * size_of(k) for k in outs], build)


class Turned(NamedTuple):
    """One tensor of a rotation: leading dimensions, and the sides of x, cos, sin and the norm's weight."""

    shape: tuple[int, ...]
    x: Side
    cos: Side
    sin: Side
    weight: Side = ABSENT


def rope(
    tensors: Sequence[Turned], n: int, kind: int, *, interleaved: bool, normed: bool, eps: float, align: int,
    device: int,
) -> Bound | None:  # fmt: skip
    """``launch(stream, x0, x1, cos, sin, w0, w1, out0, out1)`` of one or two tensors, without what is absent.

    None where no kernel fits.
    With `normed`, rows are first normalised and rounded as by rms_norm. More than four leading dimensions that do not
    collapse, and normed rows of more than 1024 elements, are for the caller to compose.
    """
    first, last, half, unit = tensors[0], tensors[-1], n // 2, 4 if normed else 8
    places, dimensions, rows = [], 1, 0
    for t in tensors:
        extents, steps = collapse(t.shape, [t.x.steps, t.cos.steps, t.sin.steps])
        count = counted("rows", math.prod(t.shape))
        if len(extents) > DIMENSIONS:
            return None
        places.append(packed(count, extents, steps))
        dimensions, rows = max(dimensions, dimensions_of(extents)), max(rows, count)
    if normed and n > 1024:
        return None
    if not normed:
        counted("pairs", rows * half)
    angles = all(whole([t.cos, t.sin], t.shape, half, unit, align) for t in tensors) and align >= 16
    vector = all(whole([t.x, t.weight], t.shape, n, unit, align) for t in tensors) and align >= 16
    second, weight = len(tensors) - 2, first.weight.kind
    macros: dict[str, Any] = {
        "TX": first.x.kind, "TC": first.cos.kind, "TS": first.sin.kind, "TW": weight, "TO": kind, "NORM": normed,
        "INTERLEAVED": interleaved, "DIMS": dimensions,
    }  # fmt: skip
    case = RowsCase(
        kinds=(0, second, 0, 0, weight, weight if len(tensors) > 1 else -1, 0, second),
        places=(places[0], places[-1]),
        columns=(first.x.column, last.x.column, first.cos.column, first.sin.column, first.weight.column,
                 last.weight.column),
        count=rows, n=half, eps=eps, vector=vector and (normed or angles),
        macros=macros | ({"ANGLES": angles and not interleaved} if normed else {}),
    )  # fmt: skip
    return serve("rope", case, device)


def columns(
    term: int, shape: Sequence[int], n: int, x: Side, d: Side, out: Side, leaf: int, start: bool, align: int,
    device: int,
) -> Bound | None:  # fmt: skip
    """``launch(stream, x, d, stats, out)``: sums over rows in ascending order, from out where `start`, else from +0.

    Each leaf of so many rows has a sum of its own, in a row of `out`, whose rows are dense where there are several.
    Terms: 0 ``d``, 1 ``d * (x * r)``, 2 ``d * ((x - mean) * r)``; `stats` holds (r, mean) of each row. None where the
    leading dimensions are too many.
    """
    extents, steps = collapse(shape, [x.steps if term else (0,) * len(shape), d.steps])
    if len(extents) > DIMENSIONS:
        return None
    rows = counted("rows", math.prod(shape), INTS - 2**10)
    case = RowsCase(
        (0, 0, 0, 0), (packed(rows, extents, steps),), (x.column, d.column, out.column, leaf), rows, n, start=start,
        macros={"TERM": term, "TX": x.kind, "TD": d.kind, "TO": out.kind, "DIMS": dimensions_of(extents)},
        vector=whole([x if term else ABSENT, d], shape, n, 4, align),
    )  # fmt: skip
    return serve("columns", case, device)


def table(shape: Sequence[int], n: int, d: Side, out: Side, height: int, start: bool, device: int) -> Bound | None:
    """``launch(stream, ids, order, d, out)``: rows of d added to those of `out` that sorted ids name, in order.

    `height` is how many rows `out` has.
    """
    extents, steps = collapse(shape, [d.steps])
    if len(extents) > DIMENSIONS:
        return None
    rows = counted("rows", math.prod(shape))
    counted("elements of a row", n, 128 * 65535)
    case = RowsCase(
        (0, 0, 0, 0), (packed(rows, extents, steps),), (d.column, out.steps[0], out.column, height), rows, n,
        start=start,
        macros={"TD": d.kind, "TO": out.kind, "DIMS": dimensions_of(extents)},
    )  # fmt: skip
    return serve("table", case, device)
