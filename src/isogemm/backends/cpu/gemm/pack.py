"""Packing: a strip of `rows` lines of an operand becomes a panel [k][step] of fp32.

    panel[kk, i] = float32(x[i, kk])        i < rows, kk < k

Three walks, chosen by the layout: along k (transposing tiles of vectors), along the lines (copying), and any strides
(element by element). All widen bf16 and fp16 exactly. K is never padded: a zero product can turn -0 into +0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..emit.target import target
from ..emit.vectors import ELEMENT_BYTES, F32_BYTES, Code, Emitter, define

WIDTH = target().width
PREFETCH_BYTES = 512  # ahead in each line, and on into the lines that come next
NEXT_PANEL_BYTES = target().nr * F32_BYTES


def _emit_along_k(e: Emitter, element: int, args: tuple[Any, ...]) -> None:
    """Lines contiguous in k. Lines from `rows` on repeat the last one; later stores or padding absorb them."""
    dst, step, src, line, k, rows = args
    size = ELEMENT_BYTES[element]
    depth = WIDTH * F32_BYTES // size
    last = e.b.sub(rows, e.i64(1))
    starts = [e.at(src, e.b.mul(e.minimum(e.i64(i), last), line)) for i in range(WIDTH)]

    def singles(first: Any, end: Any) -> None:
        with e.loop(end, start=first) as kk:
            offset = e.times(kk, size)
            e.store(e.gather([e.at(s, offset) for s in starts], element), e.at(dst, e.b.mul(kk, step)))

    head = e.head(src, line, k, element)
    singles(e.i64(0), head)
    whole = e.b.add(head, e.b.and_(e.b.sub(k, head), e.i64(-depth)))
    with e.loop(whole, start=head, step=depth) as kk:
        offset = e.times(kk, size)
        here = [e.at(s, offset) for s in starts]
        ahead = e.ahead(offset, e.times(k, size), e.b.mul(line, rows), e.i64(PREFETCH_BYTES))
        for address in here:
            e.prefetch(e.at(address, ahead), locality=2)
        out = e.at(dst, e.b.mul(kk, step))
        # Ascending k: a store's lanes beyond the panel's rows are overwritten by the next one.
        for j, column in enumerate(e.tile_columns(here, element)):
            e.store(column, e.at(out, e.b.mul(step, e.i64(j))))
    singles(whole, k)


def _emit_along_lines(e: Emitter, element: int, args: tuple[Any, ...]) -> None:
    """Lines adjacent in memory, k with any stride; `rows` <= width of them."""
    dst, step, src, k_stride, k, rows = args
    full = e.b.icmp_signed("==", rows, e.i64(WIDTH))
    with e.b.if_else(full) as (vectors, partial):
        for block, count in ((vectors, None), (partial, rows)):
            with block, e.loop(k) as kk:
                here = e.at(src, e.b.mul(kk, k_stride))
                # Consecutive k are strangers in memory: ask for the next panel's part of this line.
                e.prefetch(e.at(here, NEXT_PANEL_BYTES), locality=2)
                value = e.load_widened(here, element, count)
                e.store(value, e.at(dst, e.b.mul(kk, step)))


def _emit_any(e: Emitter, element: int, args: tuple[Any, ...]) -> None:
    """Any strides, `rows` <= width lines."""
    dst, step, src, line, k_stride, k, rows = args
    last = e.b.sub(rows, e.i64(1))
    starts = [e.at(src, e.b.mul(e.minimum(e.i64(i), last), line)) for i in range(WIDTH)]
    with e.loop(k) as kk:
        offset = e.b.mul(kk, k_stride)
        e.store(e.gather([e.at(s, offset) for s in starts], element), e.at(dst, e.b.mul(kk, step)))


def _emit(e: Emitter, element: int, args: tuple[Any, ...]) -> None:
    """Choose the walk by the strides."""
    dst, step, src, line, k_stride, k, rows = args
    size = e.i64(ELEMENT_BYTES[element])
    with e.b.if_else(e.b.icmp_signed("==", k_stride, size)) as (along_k, otherwise):
        with along_k:
            _emit_along_k(e, element, (dst, step, src, line, k, rows))
        with otherwise, e.b.if_else(e.b.icmp_signed("==", line, size)) as (along_lines, anyhow):
            with along_lines:
                _emit_along_lines(e, element, (dst, step, src, k_stride, k, rows))
            with anyhow:
                _emit_any(e, element, (dst, step, src, line, k_stride, k, rows))


def pack_lines(element: int) -> Code:
    """At most one vector of lines of a type of elements into a panel.

    Words: dst, step, src, line, k_stride, k, rows.
    """

    def code(builder: Any, words: Sequence[Any]) -> None:
        routine = define(builder.module, f"isogemm_pack_{element}", 7, lambda e, *xs: _emit(e, element, xs))
        builder.call(routine, words)

    return code
