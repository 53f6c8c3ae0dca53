"""Kernels along rows, compiled and bound for operands of one shape: each takes addresses, inputs first, and a stream.

Neither how many warps share a row nor how many elements a thread reads at once reaches the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ....errors import LimitError
from .code import (
    EACH,
    REDUCE,
    Code,
    Launch,
    bind_columns,
    bind_each,
    bind_reduce,
    bind_rope,
    bind_table,
    cluster_bytes,
    serve,
)
from .sides import ABSENT, BYTES, DIMENSIONS, Side, collapse, packed, whole

__all__ = ["EACH", "REDUCE", "Launch", "columns", "each", "reduce", "rope", "table", "team"]

LONGEST = 16384  # elements of a row that a block holds
CLUSTER_BYTES = 226 * 1024  # of a row's eighth
CLUSTERS = 16  # of eight blocks, that an H200 runs at once
SLOTS = 132 * 16  # warps that keep an H200 busy
INTS = 2**31


class Team(NamedTuple):
    """How rows are handed out: warps of a row, groups of 128 elements of a warp, rows of a warp, warps of a block."""

    warps: int
    groups: int
    rows: int
    teams: int


def team(rows: int, n: int, two: bool) -> Team | None:
    """Few rows are cut among many warps, many rows are one warp's each; None where a row is too long to hold."""
    if n > LONGEST:
        return None
    steps, alone, shared = max(1, -(-n // 128)), *((4, 8) if two else (8, 4))
    warps = 1
    while warps < 8 and -(-steps // warps) > (alone if warps == 1 else shared):
        warps *= 2
    while -(-steps // warps) > 8 or (warps < 16 and _idle(rows, steps, 2 * warps)):
        warps *= 2
    groups = -(-steps // warps)
    if warps > 1:
        return Team(warps, groups, 1, 1)
    each = 1
    while each < 4 and 2 * each * groups <= alone and rows >= 4 * SLOTS * each:
        each *= 2
    return Team(1, groups, each, 4 if groups < 4 and rows > SLOTS else 1)


def _idle(rows: int, steps: int, warps: int) -> bool:
    """Whether so many warps a row have something to do and somewhere to run."""
    return warps <= steps and rows * warps <= SLOTS


def counted(what: str, value: int, limit: int = INTS) -> int:
    """`value`, if the kernels can count that far."""
    if value >= limit:
        raise LimitError(what, limit=f"fewer than {limit}", value=value, nearest=limit - 1)
    return value


def _spread(
    shape: Sequence[int], sides: Sequence[Side], sizes: Sequence[int], build: Callable[[int, bytes, int], Launch]
) -> Launch:
    """`build(rows, place, dimensions)`; where too many dimensions are left, a launch for each index of the first.

    `sides` are the operands whose rows count, `sizes` the bytes from one index to the next of every pointer of a launch
    that is none of theirs: outputs are dense.
    """
    extents, steps = collapse(shape, [s.steps if s.kind >= 0 else (0,) * len(shape) for s in sides])
    rows = math.prod(shape)
    if len(extents) <= DIMENSIONS:
        return build(rows, packed(rows, extents, steps), 1 if len(extents) <= 1 else DIMENSIONS)
    inner = [s._replace(steps=tuple(k[1:])) if s.kind >= 0 else s for s, k in zip(sides, steps, strict=True)]
    part = rows // extents[0]
    below = _spread(extents[1:], inner, sizes, build)
    moves = [k[0] * BYTES[s.kind] for s, k in zip(sides, steps, strict=True) if s.kind >= 0]
    moves += [size * part for size in sizes]

    def launch(stream: int, *at: int) -> None:
        for i in range(extents[0]):
            below(stream, *(a + i * m for a, m in zip(at, moves, strict=True)))

    return launch


def reduce(
    kind: str, shape: Sequence[int], n: int, sides: Sequence[Side], kinds: tuple[int, int], eps: float, align: int,
    device: int,
) -> Launch:  # fmt: skip
    """``launch(stream, x, other, weight, bias, out, second)`` of an operation of `REDUCE`, without what is absent.

    Parameters
    ----------
    shape : sequence of int
        Leading dimensions.
    sides : (x, other, weight, bias)
    kinds : (int, int)
        Element codes of out and of second, -1 where there is none.
    align : int
        Divides every address.
    """
    x, other, weight, bias = sides
    single = kind in ("sum", "mean")
    rows = counted("rows", math.prod(shape))
    vector = whole(sides, shape, n, 4, align) and (single or align >= 4 * BYTES[kinds[0]])
    types = {"TX": x.kind, "TG": other.kind, "TW": weight.kind, "TB": bias.kind, "TO": kinds[0], "OP": REDUCE[kind]}
    chosen = team(rows, n, other.kind >= 0)
    counted("elements of a row", n, INTS - 2**16)
    size = (1 if single else n) * BYTES[kinds[0]]
    second = n * BYTES[kinds[1]] if kinds[1] >= 0 else 0
    if kind.endswith("_back"):
        second = 8  # two numbers of each row

    def build(count: int, place: bytes, dimensions: int) -> Launch:
        codes = [
            code
            for vec in ((True, False) if vector else (False,))
            for code in _reductions(types | {"VEC": vec, "DIMS": dimensions}, chosen, count, n)
        ]
        columns = [s.column for s in sides]
        return serve(
            codes,
            lambda code: bind_reduce(code, [*(s.kind for s in sides), *kinds], count, place, columns, n, eps, device),
            device,
        )

    moves = [s for s, kind in ((0, weight.kind), (0, bias.kind), (size, kinds[0]), (second, kinds[1])) if kind >= 0]
    return _spread(shape, (x, other), moves, build)


def _reductions(types: dict[str, Any], chosen: Team | None, count: int, n: int) -> list[Code]:
    """The kernel that is the fastest, then the one that takes rows of any length."""
    every = Code.of("long", "rows", types, THREADS=1024, U=4)
    if chosen is not None:
        w, h, r, teams = chosen
        return [Code.of("held", "rows", types, W=w, H=h, R=r, TEAMS=teams, FULL=n == 128 * w * h), every]
    cluster = Code.of("cluster", "rows", types, THREADS=512)
    fits = cluster_bytes(cluster, n) <= CLUSTER_BYTES and count <= CLUSTERS
    return [cluster, every] if fits else [every]


def each(
    kind: str, shape: Sequence[int], n: int, sides: Sequence[Side], outs: Sequence[int], align: int, device: int
) -> Launch:
    """``launch(stream, x, y, dy, out, second)`` of an operation of `EACH`, without what is absent."""
    extents, steps = collapse(
        (*shape, n), [(*s.steps, s.column) if s.kind >= 0 else (0,) * (len(shape) + 1) for s in sides]
    )
    flat = len(extents) <= 1 and all(s.kind < 0 or (k or [1])[0] == 1 for s, k in zip(sides, steps, strict=True))
    if flat:
        n, shape = math.prod(extents) * (0 if 0 in (*shape, n) else 1), ()
        sides = [s._replace(steps=(), column=1) for s in sides]
    vector = whole(sides, shape, n, 8, align) and align >= 16
    types = {"TX": sides[0].kind, "TG": sides[1].kind, "TD": sides[2].kind, "TO": outs[0], "OP": EACH[kind]}
    counted("elements of a row", n)

    def build(count: int, place: bytes, dimensions: int) -> Launch:
        codes = [Code.of("each", "each", types, VEC=v, DIMS=dimensions) for v in (vector, False)]
        steps = [s.column for s in sides]
        every = partial(counted, "elements of one operation")
        return serve(codes, lambda code: bind_each(code, outs, count, place, steps, n, every, device), device)

    return _spread(shape, sides, [n * BYTES[k] for k in outs], build)


class Turned(NamedTuple):
    """One tensor of a rotation: leading dimensions, and the sides of x, cos, sin and the norm's weight."""

    shape: tuple[int, ...]
    x: Side
    cos: Side
    sin: Side
    weight: Side = ABSENT


def rope(
    tensors: Sequence[Turned],
    n: int,
    kind: int,
    *,
    interleaved: bool,
    normed: bool,
    eps: float,
    align: int,
    device: int,
) -> Launch | None:
    """``launch(stream, x0, x1, cos, sin, w0, w1, out0, out1)`` of one or two tensors, without what is absent.

    None where no kernel fits.
    With `normed`, rows are first normalised and rounded as by rms_norm. More than four leading dimensions that do not
    collapse, and normed rows of more than 1024 elements, are for the caller to compose.
    """
    first = tensors[0]
    places, dimensions, rows = [], 1, 0
    for t in tensors:
        extents, steps = collapse(t.shape, [t.x.steps, t.cos.steps, t.sin.steps])
        count = counted("rows", math.prod(t.shape))
        if len(extents) > DIMENSIONS:
            return None
        places.append(packed(count, extents, steps))
        dimensions, rows = max(dimensions, 1 if len(extents) <= 1 else DIMENSIONS), max(rows, count)
    if normed and n > 1024:
        return None
    if not normed:
        counted("pairs", rows * (n // 2))
    along = [tensors[i].x.column for i in (0, -1)] + [first.cos.column, first.sin.column]
    along += [tensors[i].weight.column for i in (0, -1)]
    return serve(
        _rotations(tensors, n, kind, interleaved, normed, align, rows, dimensions),
        lambda code: bind_rope(code, len(tensors), rows, places, along, n // 2, eps, device),
        device,
    )


def _rotations(
    tensors: Sequence[Turned],
    n: int,
    kind: int,
    interleaved: bool,
    normed: bool,
    align: int,
    rows: int,
    dimensions: int,
) -> list[Code]:
    """The kernel that reads as many neighbours as operands allow, then the one that reads one by one."""
    first, half, unit = tensors[0], n // 2, 4 if normed else 8
    angles = all(whole([t.cos, t.sin], t.shape, half, unit, align) for t in tensors) and align >= 16
    vector = all(whole([t.x, t.weight], t.shape, n, unit, align) for t in tensors) and align >= 16
    defines: dict[str, Any] = {
        "TX": first.x.kind, "TC": first.cos.kind, "TS": first.sin.kind, "TW": first.weight.kind, "TO": kind,
        "NORM": normed, "INTERLEAVED": interleaved,
    }  # fmt: skip
    if normed:
        groups = -(-n // 128)
        each, teams = (4 if groups == 1 and rows >= 4 * SLOTS else 1), (4 if rows > 132 else 1)
        defines |= {"H": max(groups, 1), "R": each, "TEAMS": teams}
    found = []
    for vec in (vector and (normed or angles), False):
        more = {"ANGLES": vec and angles and not interleaved} if normed else {}
        found.append(Code.of("rope", "rope", defines, VEC=vec, DIMS=dimensions, **more))
    return found


def columns(
    term: int, shape: Sequence[int], n: int, x: Side, d: Side, out: Side, start: bool, align: int, device: int
) -> Launch | None:
    """``launch(stream, x, d, stats, out)``: sums over rows in ascending order, from out where `start`, else from +0.

    Terms: 0 ``d``, 1 ``d * (x * r)``, 2 ``d * ((x - mean) * r)``; `stats` holds (r, mean) of each row. None where the
    leading dimensions are too many.
    """
    extents, steps = collapse(shape, [x.steps if term else (0,) * len(shape), d.steps])
    if len(extents) > DIMENSIONS:
        return None
    rows = counted("rows", math.prod(shape), INTS - 2**10)
    vector = whole([x if term else ABSENT, d], shape, n, 4, align)
    types = {"TERM": term, "TX": x.kind, "TD": d.kind, "TO": out.kind}
    dimensions = 1 if len(extents) <= 1 else DIMENSIONS
    codes = [Code.of("columns", "columns", types, VEC=v, DIMS=dimensions) for v in (vector, False)]
    place, along = packed(rows, extents, steps), (x.column, d.column, out.column)
    return serve(codes, lambda code: bind_columns(code, place, along, n, start, device), device)


def table(shape: Sequence[int], n: int, d: Side, out: Side, start: bool, device: int) -> Launch | None:
    """``launch(stream, ids, order, d, out)``: rows of d added to those of `out` that sorted ids name, in order."""
    extents, steps = collapse(shape, [d.steps])
    if len(extents) > DIMENSIONS:
        return None
    rows = counted("rows", math.prod(shape))
    counted("elements of a row", n, 128 * 65535)
    code = Code.of(
        "table", "table", {"TD": d.kind, "TO": out.kind}, VEC=False, DIMS=1 if len(extents) <= 1 else DIMENSIONS
    )
    place, along = packed(rows, extents, steps), (d.column, out.steps[0], out.column)
    return serve([code], lambda code: bind_table(code, rows, place, along, n, start, device), device)
