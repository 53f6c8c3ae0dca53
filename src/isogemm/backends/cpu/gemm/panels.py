"""One to four rows against prepared panels: several panels at once.

    acc[i, j] = fma(x[i, k], w[j, k], acc[i, j])        k ascending

A chain waits four steps for its next sum and two can begin in each, so that one panel of two vectors leaves three
quarters of a processor idle. x is fp32, contiguous in k. Contract: ``fma/chain``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..emit.target import target
from ..emit.vectors import CACHE_LINE, ELEMENT_BYTES, F32, F32_BYTES, Code, Emitter, define, for_numbers
from .gemv import store_columns
from .quads import distance
from .turn import WAY

WIDTH, NR = target().width, target().nr
MAX_ROWS = 4
# Panels at once, by rows of x: up to 8 sums in 16 registers, up to 16 in 32.
PANELS = {1: 4, 2: 4, 3: 2, 4: 2} if WIDTH == 16 else {1: 4, 2: 2, 3: 1, 4: 1}
UNROLL = 4
# The panels that come next are asked for meanwhile, into the second-level cache; where they are too large, so far ahead
# in each, and where a processor has a distance of its own (`packed_ahead`), that far.
AHEAD_BYTES = 2048
# Of weights, up to which two to four rows walk several panels; vectors of 16 lanes bring a panel at a time sooner from
# memory (0.67 to 0.88 of the time with 4 to 42 MB). One row has shorter chains so, whatever its weights' size.
FEW_BYTES = 2**21 if WIDTH == 16 else 2**62


def serves(rows: int, nbytes: int) -> bool:
    """Whether this is the faster walk for `nbytes` of prepared weights."""
    return rows == 1 or (1 < rows <= MAX_ROWS and nbytes <= FEW_BYTES)


def _walk(e: Emitter, element: int, rows: int, panels: int, args: tuple[Any, ...]) -> None:
    """`panels` panels from column j on, of which `columns` columns are there."""
    out, out_rs, x, x_rs, w, k, columns, flags = args
    load_c = e.b.and_(flags, e.i64(1))
    size = ELEMENT_BYTES[element]
    places = [(p, v) for p in range(panels) for v in range(0, NR, WIDTH)]
    inputs = [e.at(x, e.b.mul(x_rs, e.i64(i))) for i in range(rows)]
    bases = [e.at(w, e.b.mul(k, e.i64(p * NR * size))) for p in range(panels)]
    acc = [[e.slot(e.vec) for _ in places] for _ in range(rows)]
    spots = [[e.at(out, e.b.mul(out_rs, e.i64(i)), (p * NR + v) * F32_BYTES) for p, v in places] for i in range(rows)]
    counts = [e.minimum(e.b.sub(columns, e.i64(p * NR + v)), e.i64(WIDTH)) for p, v in places]
    for spot, row in zip(spots, acc, strict=True):
        for slot in row:
            e.b.store(ir.Constant(e.vec, None), slot)
        with e.b.if_then(e.b.icmp_signed("!=", load_c, e.i64(0))):
            for address, slot, count in zip(spot, row, counts, strict=True):
                e.b.store(e.masked_load(address, count, e.vec, 4), slot)

    def step(kk: Any, u: int) -> None:
        here = e.times(kk, NR * size)
        column = [e.load_widened(e.at(bases[p], here, (u * NR + v) * size), element) for p, v in places]
        for address, row in zip(inputs, acc, strict=True):
            s = e.splat(e.load(e.at(address, e.times(kk, F32_BYTES), u * F32_BYTES), F32))
            for value, slot in zip(column, row, strict=True):
                e.b.store(e.fma(s, value, e.b.load(slot, typ=e.vec)), slot)

    far = e.i64(WAY.packed_ahead) if WAY.packed_ahead else e.b.mul(k, e.i64(panels * NR * size))
    ahead = distance(e, far, AHEAD_BYTES, flags)
    whole = e.b.and_(k, e.i64(-UNROLL))
    with e.loop(whole, step=UNROLL) as kk:
        with e.b.if_then(e.b.icmp_signed("!=", ahead, e.i64(0))):
            for base in bases:
                for line in range(0, UNROLL * NR * size, CACHE_LINE):
                    e.prefetch(e.at(base, e.times(kk, NR * size), ahead, line), locality=2)
        for u in range(UNROLL):
            step(kk, u)
    with e.loop(k, start=whole) as kk:
        step(kk, 0)
    for spot, row in zip(spots, acc, strict=True):
        for address, slot, count in zip(spot, row, counts, strict=True):
            with e.b.if_then(e.b.icmp_signed(">", count, e.i64(0))):
                store_columns(e, e.canonical(e.b.load(slot, typ=e.vec)), address, count)


def _emit(e: Emitter, element: int, rows: int, args: tuple[Any, ...]) -> None:
    out, out_rs, x, x_rs, w, k, columns, load_c, _ = args
    wide = PANELS[rows] * NR
    whole = e.b.and_(columns, e.i64(-wide))
    for first, end, panels in ((e.i64(0), whole, PANELS[rows]), (whole, columns, 1)):
        name = f"isogemm_panels_{element}_{rows}_{panels}"
        walk = define(e.b.module, name, 8, lambda s, *xs, p=panels: _walk(s, element, rows, p, xs))
        with e.loop(end, start=first, step=panels * NR) as j:
            panel = e.at(w, e.b.mul(e.times(j, ELEMENT_BYTES[element]), k))
            left = e.minimum(e.b.sub(columns, j), e.i64(panels * NR))
            e.b.call(walk, [e.at(out, e.times(j, F32_BYTES)), out_rs, x, x_rs, panel, k, left, load_c])


def panel_strips(element: int) -> Code:
    """out[rows <= MAX_ROWS, columns] from the panel at `w` on, of a type of elements.

    Words: rows, out, out_rs, x, x_rs, w, k, columns, load_c, 0.
    """
    return for_numbers(f"isogemm_panels_{element}", range(1, MAX_ROWS + 1), lambda e, n, xs: _emit(e, element, n, xs))
