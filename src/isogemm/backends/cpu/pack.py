"""Packing: a strip of `rows` lines of an operand becomes a panel [k][step] of fp32.

    panel[kk, i] = float32(x[i, kk])        i < rows, kk < k

Three walks, chosen by the layout: along k (transposing tiles of vectors), along the lines (copying), and any strides
(element by element). All widen bf16 and fp16 exactly. K is never padded: a zero product can turn -0 into +0.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .target import target
from .vectors import BFLOAT16, ELEMENT_BYTES, F32_BYTES, FLOAT16, FLOAT32, Emitter, define

WIDTH = target().width
ELEMENTS = (FLOAT32, BFLOAT16, FLOAT16)
PREFETCH_BYTES = 512


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
        for address in here:
            e.prefetch(e.at(address, PREFETCH_BYTES), locality=2)
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
                value = e.load_widened(e.at(src, e.b.mul(kk, k_stride)), element, count)
                e.store(value, e.at(dst, e.b.mul(kk, step)))


def _emit_any(e: Emitter, element: int, args: tuple[Any, ...]) -> None:
    """Any strides, `rows` <= width lines."""
    dst, step, src, line, k_stride, k, rows = args
    last = e.b.sub(rows, e.i64(1))
    starts = [e.at(src, e.b.mul(e.minimum(e.i64(i), last), line)) for i in range(WIDTH)]
    with e.loop(k) as kk:
        offset = e.b.mul(kk, k_stride)
        e.store(e.gather([e.at(s, offset) for s in starts], element), e.at(dst, e.b.mul(kk, step)))


def _by_element(name: str, arguments: int, emit: Any) -> Any:
    """routine(element, *args): a switch over the element type."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        element, *rest = args
        end = builder.append_basic_block("pack_done")
        switch = builder.switch(element, end)
        for code in ELEMENTS:
            fn = define(builder.module, f"{name}_{code}", arguments, lambda e, *xs, c=code: emit(e, c, xs))
            block = builder.append_basic_block(f"element_{code}")
            switch.add_case(ir.Constant(ir.IntType(64), code), block)
            builder.position_at_end(block)
            builder.call(fn, rest)
            builder.branch(end)
        builder.position_at_end(end)

    return types.void(*[types.int64] * (arguments + 1)), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pack_along_k(typingctx, element, dst, step, src, line, k, rows):  # type: ignore[no-untyped-def]
    """One vector of lines, contiguous in k."""
    return _by_element("isogemm_pack_k", 6, _emit_along_k)


@intrinsic  # type: ignore[untyped-decorator]
def pack_along_lines(typingctx, element, dst, step, src, k_stride, k, rows):  # type: ignore[no-untyped-def]
    """One vector of lines, adjacent in memory."""
    return _by_element("isogemm_pack_lines", 6, _emit_along_lines)


@intrinsic  # type: ignore[untyped-decorator]
def pack_any(typingctx, element, dst, step, src, line, k_stride, k, rows):  # type: ignore[no-untyped-def]
    """One vector of lines, any strides."""
    return _by_element("isogemm_pack_any", 7, _emit_any)
