"""The register tile: C[mr, nr] += A[mr, k] @ B[k, nr], one k at a time.

    acc[i, j] = fma(a[i, k], b[k, j], acc[i, j])        k ascending

A is packed in panels of `mr` rows ([k][mr]) or walked in place by strides; B is a panel of NR columns with any row
stride; C has unit column stride. Starting from C's tile instead of zero continues the chain, so cutting K into panels
keeps its bits. Contract: ``fma/chain``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .target import target
from .vectors import BFLOAT16, ELEMENT_BYTES, F32, F32_BYTES, FLOAT16, FLOAT32, I64, Emitter, define

MR, NR, WIDTH = target().mr, target().nr, target().width
UNROLL = 4


def _emit_tile(e: Emitter, mr: int, packed: bool, element: int, args: tuple[Any, ...]) -> None:
    k, a, a_rs, a_cs, b, b_rs, c, c_rs, load_c = args
    vectors = NR // WIDTH
    acc = [[e.slot(e.vec) for _ in range(vectors)] for _ in range(mr)]
    zero = ir.Constant(e.vec, None)
    with e.b.if_else(e.b.icmp_signed("!=", load_c, e.i64(0))) as (continued, fresh):
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

    whole = e.b.and_(k, e.i64(-UNROLL))
    with e.loop(whole, step=UNROLL) as kk:
        a0, b0 = e.at(a, e.b.mul(kk, a_cs)), e.at(b, e.b.mul(kk, b_rs))
        for u in range(UNROLL):
            step(e.at(a0, e.b.mul(a_cs, e.i64(u))), e.at(b0, e.b.mul(b_rs, e.i64(u))))
    with e.loop(k, start=whole) as kk:
        step(e.at(a, e.b.mul(kk, a_cs)), e.at(b, e.b.mul(kk, b_rs)))
    for i in range(mr):
        row = e.at(c, e.b.mul(c_rs, e.i64(i)))
        for v in range(vectors):
            e.store(e.canonical(e.b.load(acc[i][v], typ=e.vec)), e.at(row, v * WIDTH * F32_BYTES))


def _switch(builder: Any, rows: Any, rest: Any, largest: int, packed: bool, element: int, name: str) -> None:
    """Call the routine for the row count."""
    end = builder.append_basic_block("tile_done")
    switch = builder.switch(rows, end)
    for count in range(1, largest + 1):
        fn = define(builder.module, f"{name}_{count}", 9, lambda e, *xs, n=count: _emit_tile(e, n, packed, element, xs))
        block = builder.append_basic_block(f"rows_{count}")
        switch.add_case(ir.Constant(I64, count), block)
        builder.position_at_end(block)
        builder.call(fn, rest)
        builder.branch(end)
    builder.position_at_end(end)


@intrinsic  # type: ignore[untyped-decorator]
def tile_packed(typingctx, mr, k, a, b, b_rs, c, c_rs, load_c):  # type: ignore[no-untyped-def]
    """A in panels [k][mr], B in fp32 rows; mr <= MR."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        rows, k, a, *rest = args
        zero = ir.Constant(I64, 0)
        _switch(builder, rows, [k, a, zero, zero, *rest], MR, True, FLOAT32, "isogemm_tile_packed")

    return types.void(*[types.int64] * 8), codegen


# Fewer rows than MR in place, because each row is an address stream of its own.
MR_DIRECT = min(MR, 8)


@intrinsic  # type: ignore[untyped-decorator]
def tile_direct(typingctx, element, mr, k, a, a_rs, a_cs, b, b_rs, c, c_rs, load_c):  # type: ignore[no-untyped-def]
    """A in place by strides, B in rows of any element type; mr <= MR_DIRECT."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        element, rows, *rest = args
        end = builder.append_basic_block("element_done")
        switch = builder.switch(element, end)
        for code in (FLOAT32, BFLOAT16, FLOAT16):
            block = builder.append_basic_block(f"element_{code}")
            switch.add_case(ir.Constant(I64, code), block)
            builder.position_at_end(block)
            _switch(builder, rows, rest, MR_DIRECT, False, code, f"isogemm_tile_direct_{code}")
            builder.branch(end)
        builder.position_at_end(end)

    return types.void(*[types.int64] * 11), codegen
