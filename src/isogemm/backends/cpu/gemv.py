"""Few rows against weights stored [n, k], in place: the weights are read once and never written anywhere.

    acc[i, j] = fma(x[i, k], w[j, k], acc[i, j])        k ascending, i < rows <= 4

A tile of `width` weight rows is transposed in registers, so that lanes are columns of the output and each output still
walks its own chain. x is fp32, packed [rows][k]. Contract: ``fma/chain``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .target import target
from .vectors import ELEMENT_BYTES, F32, F32_BYTES, Emitter, define, switch_over

WIDTH = target().width
MAX_ROWS = 4
# Bytes ahead in each weight row. The lines of 16 rows can fall into one set of the first-level cache (a row stride of
# 16 KiB does), so they are asked for into the second level.
PREFETCH_BYTES = 768


def _emit(e: Emitter, element: int, rows: int, args: tuple[Any, ...]) -> None:
    out, out_rs, x, x_rs, w, line, k, columns, load_c = args
    size = ELEMENT_BYTES[element]
    depth = WIDTH * F32_BYTES // size
    acc = [e.slot(e.vec) for _ in range(rows)]
    with e.b.if_else(e.b.icmp_signed("!=", load_c, e.i64(0))) as (continued, fresh):
        with continued:
            for i in range(rows):
                e.b.store(e.masked_load(e.at(out, e.b.mul(out_rs, e.i64(i))), columns, e.vec, 4), acc[i])
        with fresh:
            for s in acc:
                e.b.store(ir.Constant(e.vec, None), s)
    last = e.b.sub(columns, e.i64(1))
    starts = [e.at(w, e.b.mul(e.minimum(e.i64(j), last), line)) for j in range(WIDTH)]
    inputs = [e.at(x, e.b.mul(x_rs, e.i64(i))) for i in range(rows)]

    def step(column: Any, k_bytes: Any) -> None:
        for i in range(rows):
            s = e.splat(e.load(e.at(inputs[i], k_bytes), F32))
            e.b.store(e.fma(s, column, e.b.load(acc[i], typ=e.vec)), acc[i])

    def singles(first: Any, end: Any) -> None:
        with e.loop(end, start=first) as kk:
            step(e.gather([e.at(s, e.times(kk, size)) for s in starts], element), e.times(kk, F32_BYTES))

    head = e.head(w, line, k, element)
    singles(e.i64(0), head)
    whole = e.b.add(head, e.b.and_(e.b.sub(k, head), e.i64(-depth)))
    with e.loop(whole, start=head, step=depth) as kk:
        offset = e.times(kk, size)
        here = [e.at(s, offset) for s in starts]
        for address in here:
            e.prefetch(e.at(address, PREFETCH_BYTES), locality=2)
        k_bytes = e.times(kk, F32_BYTES)
        for j, column in enumerate(e.tile_columns(here, element)):
            step(column, e.at(k_bytes, j * F32_BYTES))
    singles(whole, k)
    for i in range(rows):
        store_columns(e, e.canonical(e.b.load(acc[i], typ=e.vec)), e.at(out, e.b.mul(out_rs, e.i64(i))), columns)


def store_columns(e: Emitter, value: Any, address: Any, columns: Any) -> None:
    full = e.b.icmp_signed("==", columns, e.i64(WIDTH))
    with e.b.if_else(full) as (whole, partial):
        with whole:
            e.store(value, address)
        with partial:
            held = e.slot(e.vec)
            e.b.store(value, held)
            base = e.b.ptrtoint(held, ir.IntType(64))
            with e.loop(columns) as j:
                offset = e.times(j, F32_BYTES)
                e.store(e.load(e.at(base, offset), F32), e.at(address, offset))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gemv_tile(typingctx, element, rows, out, out_rs, x, x_rs, w, line, k, columns, load_c):  # type: ignore[no-untyped-def]
    """out[rows, columns] for one vector of weight rows; `element` is a constant of the compiled routine."""
    code = element.literal_value

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        routines = {
            n: define(builder.module, f"isogemm_gemv_{code}_{n}", 9, lambda e, *xs, n=n: _emit(e, code, n, xs))
            for n in range(1, MAX_ROWS + 1)
        }
        switch_over(builder, args[1], routines, args[2:])

    return types.void(element, *[types.int64] * 10), codegen
