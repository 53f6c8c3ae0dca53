"""Few rows against weights stored [n, k], in place: the weights are read once and never written anywhere.

    acc[i, j] = fma(x[i, k], w[j, k], acc[i, j])        k ascending

A tile of `width` weight rows is transposed in registers, so that lanes are columns of the output and each output still
walks its own chain. Up to GROUP rows keep their accumulators in registers; more rows take turns over the same tile,
with accumulators in the first-level cache. x is fp32, contiguous in k. Contract: ``fma/chain``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..emit.target import target
from ..emit.vectors import CACHE_LINE, ELEMENT_BYTES, F32, F32_BYTES, I64, Code, Emitter, for_numbers

WIDTH = target().width
# Accumulators beside a transposed tile: 8 + 16 of 32 registers, 4 + 8 of 16.
GROUP = 8 if WIDTH == 16 else 4
# Bytes ahead in each weight row, and on into the next tile's. The lines of 16 rows can fall into one set of the
# first-level cache (a row stride of 16 KiB does), so they are asked for into the second level.
PREFETCH_BYTES = 768


class _Tile:
    """One column tile: addresses of the weight rows, and the walk over k around the tiles."""

    def __init__(self, e: Emitter, element: int, w: Any, line: Any, k: Any, columns: Any) -> None:
        self.e, self.element, self.w, self.line, self.k = e, element, w, line, k
        self.size = ELEMENT_BYTES[element]
        self.depth = WIDTH * F32_BYTES // self.size
        last = e.b.sub(columns, e.i64(1))
        self.starts = [e.at(w, e.b.mul(e.minimum(e.i64(j), last), line)) for j in range(WIDTH)]

    def walk(self, single: Any, tile: Any) -> None:
        """single(k index, column) for the ends, tile(k index, columns) for whole tiles; k ascending."""
        e = self.e
        head = e.head(self.w, self.line, self.k, self.element)
        whole = e.b.add(head, e.b.and_(e.b.sub(self.k, head), e.i64(-self.depth)))
        self._singles(e.i64(0), head, single)
        with e.loop(whole, start=head, step=self.depth) as kk:
            offset = e.times(kk, self.size)
            here = [e.at(s, offset) for s in self.starts]
            ahead = e.ahead(offset, e.times(self.k, self.size), e.times(self.line, WIDTH), e.i64(PREFETCH_BYTES))
            for address in here:
                e.prefetch(e.at(address, ahead), locality=2)
            tile(kk, e.tile_columns(here, self.element))
        self._singles(whole, self.k, single)

    def _singles(self, first: Any, end: Any, single: Any) -> None:
        e = self.e
        with e.loop(end, start=first) as kk:
            offset = e.times(kk, self.size)
            single(kk, e.gather([e.at(s, offset) for s in self.starts], self.element))


def _emit_group(e: Emitter, element: int, rows: int, args: tuple[Any, ...]) -> None:
    """At most GROUP rows: accumulators in registers."""
    out, out_rs, x, x_rs, w, line, k, columns, load_c = args
    acc = [e.slot(e.vec) for _ in range(rows)]
    outputs = [e.at(out, e.b.mul(out_rs, e.i64(i))) for i in range(rows)]
    with e.b.if_else(e.b.icmp_signed("!=", load_c, e.i64(0))) as (continued, fresh):
        with continued:
            for address, s in zip(outputs, acc, strict=True):
                e.b.store(e.masked_load(address, columns, e.vec, 4), s)
        with fresh:
            for s in acc:
                e.b.store(ir.Constant(e.vec, None), s)
    inputs = [e.at(x, e.b.mul(x_rs, e.i64(i))) for i in range(rows)]

    def single(kk: Any, column: Any) -> None:
        k_bytes = e.times(kk, F32_BYTES)
        for address, s in zip(inputs, acc, strict=True):
            e.b.store(e.fma(e.splat(e.load(e.at(address, k_bytes), F32)), column, e.b.load(s, typ=e.vec)), s)

    def tile(kk: Any, tile_columns: list[Any]) -> None:
        for j, column in enumerate(tile_columns):
            single(e.at(kk, j), column)

    _Tile(e, element, w, line, k, columns).walk(single, tile)
    for address, s in zip(outputs, acc, strict=True):
        store_columns(e, e.canonical(e.b.load(s, typ=e.vec)), address, columns)


def _emit_groups(e: Emitter, element: int, rest: int, args: tuple[Any, ...]) -> None:
    """GROUP rows `groups` times and `rest` more: accumulators [rows][width] in `acc`, zero or C on entry."""
    groups, acc, x, x_rs, w, line, k, columns, _ = args
    line_bytes = WIDTH * F32_BYTES

    def turn(count: int, first: Any, kk: Any, tile_columns: list[Any]) -> None:
        slots = [e.at(acc, e.times(first, line_bytes), i * line_bytes) for i in range(count)]
        inputs = [e.at(x, e.b.mul(x_rs, e.at(first, i)), e.times(kk, F32_BYTES)) for i in range(count)]
        values = [e.load(s, e.vec, CACHE_LINE if line_bytes == CACHE_LINE else 4) for s in slots]
        for j, column in enumerate(tile_columns):
            values = [
                e.fma(e.splat(e.load(e.at(inputs[i], j * F32_BYTES), F32)), column, values[i]) for i in range(count)
            ]
        for value, s in zip(values, slots, strict=True):
            e.store(value, s)

    def tile(kk: Any, tile_columns: list[Any]) -> None:
        with e.loop(groups) as g:
            turn(GROUP, e.times(g, GROUP), kk, tile_columns)
        if rest:
            turn(rest, e.times(groups, GROUP), kk, tile_columns)

    _Tile(e, element, w, line, k, columns).walk(lambda kk, column: tile(kk, [column]), tile)


def store_columns(e: Emitter, value: Any, address: Any, columns: Any) -> None:
    """The first `columns` lanes; nothing behind them is touched."""
    full = e.b.icmp_signed("==", columns, e.i64(WIDTH))
    with e.b.if_else(full) as (whole, partial):
        with whole:
            e.store(value, address)
        with partial:
            held = e.slot(e.vec)
            e.b.store(value, held)
            base = e.b.ptrtoint(held, I64)
            with e.loop(columns) as j:
                offset = e.times(j, F32_BYTES)
                e.store(e.load(e.at(base, offset), F32), e.at(address, offset))


def gemv_tile(element: int) -> Code:
    """out[rows <= GROUP, columns] for one vector of weight rows of a type of elements.

    Words: rows, out, out_rs, x, x_rs, w, line, k, columns, load_c.
    """
    return for_numbers(f"isogemm_gemv_{element}", range(1, GROUP + 1), lambda e, n, xs: _emit_group(e, element, n, xs))


def gemv_groups(element: int) -> Code:
    """acc[groups * GROUP + rest, width] for one vector of weight rows.

    Words: rest, groups, acc, x, x_rs, w, line, k, columns, 0.
    """
    return for_numbers(f"isogemm_gemvs_{element}", range(GROUP), lambda e, n, xs: _emit_groups(e, element, n, xs))
