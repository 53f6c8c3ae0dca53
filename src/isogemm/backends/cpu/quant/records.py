"""Vector code for a block of activations: its largest magnitude, and its codes with their sums; and for one of weights.

    32     q = x * r to the nearest, halves away from zero
    256    q = x * r to the nearest, halves to even

Integers alone are reduced across lanes, so the vector width cannot reach a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..emit.target import target
from ..emit.vectors import F32, I8, I16, I32, Emitter, declare

WIDTH = target().width


def _across(e: Emitter, name: str, value: Any) -> Any:
    fn = declare(e.b.module, f"llvm.vector.reduce.{name}.v{WIDTH}i32", I32, [e.ivec])
    return e.b.call(fn, [value])


def _magnitude(e: Emitter, x: Any) -> Any:
    return e.b.and_(e.b.bitcast(x, e.ivec), e.constant(0x7FFFFFFF))


@intrinsic(prefer_literal=True)
def largest_of(typingctx, block, x):
    """Bits of the largest |x| of `block` adjacent float32; an infinity's and a NaN's are beyond any number's."""
    count = block.literal_value

    def codegen(context, builder, signature, args):
        e = Emitter(builder)
        most = ir.Constant(e.ivec, None)
        for i in range(0, count, WIDTH):
            bits = _magnitude(e, e.load(e.at(args[1], 4 * i), e.vec))
            most = e.b.select(e.b.icmp_unsigned(">", bits, most), bits, most)
        return _across(e, "umax", most)

    return types.uint32(block, types.int64), codegen


def _to_even(e: Emitter, y: Any) -> Any:
    """For |y| < 2**22: adding 1.5 * 2**23 leaves the integer in the low bits."""
    shifted = e.b.fadd(y, ir.Constant(e.vec, [12582912.0] * WIDTH))
    return e.b.sub(e.b.and_(e.b.bitcast(shifted, e.ivec), e.constant(0x7FFFFF)), e.constant(0x400000))


def _away(e: Emitter, y: Any) -> Any:
    size = e.b.bitcast(_magnitude(e, y), e.vec)
    whole = e.b.fptosi(size, e.ivec)
    rest = e.b.fsub(size, e.b.sitofp(whole, e.vec))
    up = e.b.fcmp_ordered(">=", rest, ir.Constant(e.vec, [0.5] * WIDTH))
    whole = e.b.add(whole, e.b.zext(up, e.ivec))
    below = e.b.fcmp_ordered("<", y, ir.Constant(e.vec, None))
    return e.b.select(below, e.b.neg(whole), whole)


@intrinsic(prefer_literal=True)
def codes_of(typingctx, block, sub, short, x, r, codes, sums, factor):
    """int8 codes of `block` adjacent float32 times r, and for each `sub` of them their sum times `factor`.

    Sums are int16 where `short` is 1, else int32. Returns the last sum, without the factor.
    x * r has to be a number below 2**22.
    """
    count, each = block.literal_value, sub.literal_value

    def codegen(context, builder, signature, args):
        e = Emitter(builder)
        _, _, _, x, r, codes, sums, factor = args
        size = 2 if short.literal_value else 4
        r, total = e.splat(r), None
        for first in range(0, count, each):
            parts = []
            for i in range(first, first + each, WIDTH):
                y = e.b.fmul(e.load(e.at(x, 4 * i), e.vec), r)
                q = _away(e, y) if count == 32 else _to_even(e, y)
                e.store(e.b.trunc(q, ir.VectorType(I8, WIDTH)), e.at(codes, i), 1)
                parts.append(q)
            whole = parts[0]
            for part in parts[1:]:
                whole = e.b.add(whole, part)
            total = _across(e, "add", whole)
            scaled = e.b.mul(total, e.b.trunc(factor, I32))
            kept = e.b.trunc(scaled, I16) if size == 2 else scaled
            e.store(kept, e.at(sums, size * (first // each)), size)
        return total

    floats_and_places = (types.int64, types.float32, types.int64, types.int64, types.int64)
    return types.int32(block, sub, short, *floats_and_places), codegen


@intrinsic(prefer_literal=True)
def multiply_out(typingctx, block, sub, shifted, d, o, q, s, t, x):
    """x = (d * s) * q + o * t for int8 codes q, int32 s and t; without the second term where `shifted` is 0."""
    count, each, has_shift = block.literal_value, sub.literal_value, bool(shifted.literal_value)

    def codegen(context, builder, signature, args):
        e = Emitter(builder)
        _, _, _, d, o, q, s, t, x = args
        scale = shift = None
        for i in range(0, count, WIDTH):
            if i % each == 0:
                at = 4 * (i // each)
                scale = e.splat(e.b.fmul(d, e.b.sitofp(e.load(e.at(s, at), I32), F32)))
                if has_shift:
                    shift = e.splat(e.b.fmul(o, e.b.sitofp(e.load(e.at(t, at), I32), F32)))
            code = e.b.sext(e.load(e.at(q, i), ir.VectorType(I8, WIDTH), 1), e.ivec)
            value = e.b.fmul(scale, e.b.sitofp(code, e.vec))
            e.store(e.b.fadd(value, shift) if has_shift else value, e.at(x, 4 * i))

    floats_and_places = (types.float32, types.float32, types.int64, types.int64, types.int64, types.int64)
    return types.void(block, sub, shifted, *floats_and_places), codegen
