"""The register tile: C[mr, nr] += A[mr, k] @ B[k, nr], one k at a time.

    acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending

A is packed in panels of `mr` rows ([k][mr]) or walked in place by strides; B is a panel of NR columns, or of HALF, with
any row stride; C has unit column stride. Starting from C's tile instead of zero continues the chain, so cutting K into
panels keeps its bits. Contract: ``fma/chain``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..emit.descriptor import CONTINUES
from ..emit.target import target
from ..emit.vectors import CACHE_LINE, ELEMENT_BYTES, F32, F32_BYTES, Code, Emitter, for_numbers

MR, NR, WIDTH, MR_DIRECT = target().mr, target().nr, target().width, target().mr_direct
HALF = NR // 2  # columns of the narrower tile
UNROLL = 4
# Flags beside CONTINUES: the tile of the next rows follows, whose part of C is asked for; the other flags, bytes ahead
# that B is asked for, lead to its next panel. Of either a line is asked for with each UNROLL of K.
NEXT_ROWS, NEXT_PANEL = 2, 4
PLACES = NR * F32_BYTES // CACHE_LINE + 1  # of a row of C: it may begin between two lines


def _emit_tile(e: Emitter, mr: int, nr: int, packed: bool, element: int, args: tuple[Any, ...]) -> None:
    k, a, a_rs, a_cs, b, b_rs, c, c_rs, flags = args
    vectors = nr // WIDTH
    acc = [[e.slot(e.vec) for _ in range(vectors)] for _ in range(mr)]
    zero = ir.Constant(e.vec, None)
    for i in range(mr):
        # C's lines come while the sums are made: stores that miss would stall the tile's end.
        row = e.at(c, e.b.mul(c_rs, e.i64(i)))
        for offset in (*range(0, nr * F32_BYTES, CACHE_LINE), nr * F32_BYTES - 1):
            e.prefetch(e.at(row, offset), write=1)
    ahead = e.b.and_(flags, e.i64(-CACHE_LINE))
    with e.b.if_else(_has(e, flags, CONTINUES)) as (continued, fresh):
        with continued:
            for i in range(mr):
                row = e.at(c, e.b.mul(c_rs, e.i64(i)))
                for v in range(vectors):
                    e.b.store(e.load(e.at(row, v * WIDTH * F32_BYTES), e.vec), acc[i][v])
        with fresh:
            for row_slots in acc:
                for s in row_slots:
                    e.b.store(zero, s)
    if packed:
        a_rs, a_cs = e.i64(F32_BYTES), e.i64(F32_BYTES * mr)
    rows = [e.b.mul(a_rs, e.i64(i)) for i in range(mr)]

    def step(a_k: Any, b_k: Any) -> None:
        bv = [e.load_widened(e.at(b_k, v * WIDTH * ELEMENT_BYTES[element]), element) for v in range(vectors)]
        for i in range(mr):
            s = e.splat(e.load(e.at(a_k, rows[i]), F32))
            for v in range(vectors):
                e.b.store(e.fma(s, bv[v], e.b.load(acc[i][v], typ=e.vec)), acc[i][v])

    # Sums that go on begin with C: it has come where the tile before asked for it.
    next_c = e.at(c, e.b.select(_has(e, flags, NEXT_ROWS), e.b.mul(c_rs, e.i64(mr)), e.i64(0)))
    whole = e.b.and_(k, e.i64(-UNROLL))
    with e.loop(whole, step=UNROLL) as kk:
        a0, b0 = e.at(a, e.b.mul(kk, a_cs)), e.at(b, e.b.mul(kk, b_rs))
        turn = e.b.sdiv(kk, e.i64(UNROLL))
        row, place = e.minimum(e.b.sdiv(turn, e.i64(PLACES)), e.i64(mr - 1)), e.b.srem(turn, e.i64(PLACES))
        within = e.minimum(e.times(place, CACHE_LINE), e.i64(nr * F32_BYTES - 1))
        e.prefetch(e.at(next_c, e.b.mul(c_rs, row), within), write=1)
        asks = e.b.icmp_signed("!=", ahead, e.i64(0))
        with e.b.if_then(asks), e.b.if_else(_has(e, flags, NEXT_PANEL)) as (of_next, of_this):
            with of_next:
                e.prefetch(e.at(b, ahead, e.times(turn, CACHE_LINE)), locality=2)
            with of_this:
                for line in range(0, UNROLL * NR * ELEMENT_BYTES[element], CACHE_LINE):
                    e.prefetch(e.at(b0, ahead, line))
        for u in range(UNROLL):
            step(e.at(a0, e.b.mul(a_cs, e.i64(u))), e.at(b0, e.b.mul(b_rs, e.i64(u))))
    with e.loop(k, start=whole) as kk:
        step(e.at(a, e.b.mul(kk, a_cs)), e.at(b, e.b.mul(kk, b_rs)))
    for i in range(mr):
        row = e.at(c, e.b.mul(c_rs, e.i64(i)))
        for v in range(vectors):
            e.store(e.canonical(e.b.load(acc[i][v], typ=e.vec)), e.at(row, v * WIDTH * F32_BYTES))


def _has(e: Emitter, flags: Any, flag: int) -> Any:
    return e.b.icmp_signed("!=", e.b.and_(flags, e.i64(flag)), e.i64(0))


def tile(columns: int, element: int, *, packed: bool) -> Code:
    """A in panels [k][rows] (`packed`; its strides are ignored) or in place; B in rows of a type of elements.

    `columns` is NR or HALF. Words: rows (at most MR, or MR_DIRECT in place), k, a, a_rs, a_cs, b, b_rs, c, c_rs, flags.
    """
    name, largest = ("packed", MR) if packed else ("direct", MR_DIRECT)
    return for_numbers(
        f"isogemm_tile_{name}_{element}_{columns}", range(1, largest + 1),
        lambda e, n, xs: _emit_tile(e, n, columns, packed, element, xs),
    )  # fmt: skip
