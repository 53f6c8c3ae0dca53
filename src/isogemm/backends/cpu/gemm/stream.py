"""Few rows against weights stored [k, n], in place: rows of B stream by once, the accumulators stay in cache.

    acc[i, j] = fma(x[i, k], b[k, j], acc[i, j])        DEPTH rows of B at a time, k ascending

Contract: ``fma/chain``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..emit.descriptor import CONTINUES
from ..emit.target import target
from ..emit.vectors import ELEMENT_BYTES, F32, F32_BYTES, I64, Code, Emitter, define, switch_over
from .facts import FEW_ROWS
from .gemv import store_columns

WIDTH = target().width
DEPTH = 8
ASKS = 2  # a flag beside CONTINUES: the next DEPTH rows of B are asked for
NEAR_BYTES = 2**15  # of DEPTH rows, up to which one row of x and two ask as well: more come as soon unasked


def _emit(e: Emitter, element: int, rows: int, depth: int, args: tuple[Any, ...]) -> None:
    acc, acc_rs, x, x_rs, b, b_rs, columns, flags = args
    size = ELEMENT_BYTES[element]
    inputs = [
        [e.splat(e.load(e.at(x, e.b.mul(x_rs, e.i64(i)), u * F32_BYTES), F32)) for u in range(depth)]
        for i in range(rows)
    ]
    lines = [e.at(b, e.b.mul(b_rs, e.i64(u))) for u in range(depth)]
    fresh = e.b.icmp_signed("==", e.b.and_(flags, e.i64(CONTINUES)), e.i64(0))

    def strip(j: Any, count: Any, asks: bool) -> None:
        offset = e.times(j, F32_BYTES)
        targets = [e.at(acc, e.b.mul(acc_rs, e.i64(i)), offset) for i in range(rows)]
        values = [e.load(t, e.vec) if count is None else e.masked_load(t, count, e.vec, 4) for t in targets]
        values = [e.b.select(fresh, ir.Constant(e.vec, None), v) for v in values]
        if asks:
            for line in lines:
                e.prefetch(e.at(line, e.times(j, size), e.times(b_rs, depth)))
        for u in range(depth):
            column = e.load_widened(e.at(lines[u], e.times(j, size)), element, count)
            values = [e.fma(inputs[i][u], column, values[i]) for i in range(rows)]
        for value, t in zip(values, targets, strict=True):
            if count is None:
                e.store(e.canonical(value), t)
            else:
                store_columns(e, e.canonical(value), t, count)

    whole = e.b.and_(columns, e.i64(-WIDTH))
    with e.b.if_else(e.b.icmp_signed(">=", flags, e.i64(ASKS))) as (from_memory, from_cache):
        for block, asks in ((from_memory, True), (from_cache, False)):
            with block, e.loop(whole, step=WIDTH) as j:
                strip(j, None, asks)
    rest = e.b.sub(columns, whole)
    with e.b.if_then(e.b.icmp_signed(">", rest, e.i64(0))):
        strip(whole, rest, asks=False)


def stream_rows(element: int) -> Code:
    """DEPTH rows of B of a type of elements, or one when `deep` is 0, into `rows` accumulator rows.

    Words: rows, deep, acc, acc_rs, x, x_rs, b, b_rs, columns, flags.
    """

    def code(builder: Any, words: Sequence[Any]) -> None:
        rows, deep, *rest = words
        routines = {}
        for n in range(1, FEW_ROWS + 1):
            for is_deep, depth in ((0, 1), (1, DEPTH)):
                name = f"isogemm_stream_{element}_{n}_{depth}"
                routines[2 * n + is_deep] = define(
                    builder.module, name, 8, lambda e, *xs, n=n, depth=depth: _emit(e, element, n, depth, xs)
                )
        switch_over(builder, builder.add(builder.mul(rows, ir.Constant(I64, 2)), deep), routines, rest)

    return code
