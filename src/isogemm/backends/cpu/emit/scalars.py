"""Single elements by address: loads with exact widening, stores with one rounding, and the epilogue of a tile.

    v = acc;  v = alpha * v;  v = v + beta * c;  v = v + bias;  out = round(v)

Every step rounds once, in fp32, in this order; steps whose scalar is 1 (alpha) or 0 (beta) do not happen.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ....base.jit import njit
from ....contract.arithmetic import reinterpret
from . import descriptor as f
from .vectors import BFLOAT16, CANONICAL_NAN, FLOAT16, FLOAT32

_NUMBERS = {64: types.int64, 32: types.uint32, 16: types.uint16, 8: types.uint8}


def _element(builder: Any, kind: Any, address: Any, *index: Any) -> Any:
    """A pointer to a scalar at an address, or to an element behind it, by arithmetic that the vectorizer can follow."""
    base = builder.inttoptr(address, ir.PointerType(kind))
    return builder.gep(base, index, source_etype=kind) if index else base


def _loads(bits: int) -> tuple[Any, Any]:
    """Loads of one scalar: at an address, and of element j behind one."""
    kind, number = ir.IntType(bits), _NUMBERS[bits]

    def codegen(context, builder, signature, args):
        return builder.load(_element(builder, kind, *args), align=bits // 8, typ=kind)

    @intrinsic
    def peek(typingctx, address):
        return number(types.int64), codegen

    @intrinsic
    def peek_at(typingctx, address, j):
        return number(types.int64, types.int64), codegen

    return peek, peek_at


def _stores(bits: int) -> tuple[Any, Any]:
    """Stores, likewise."""
    kind, number = ir.IntType(bits), _NUMBERS[bits]

    def codegen(context, builder, signature, args):
        *place, value = args
        builder.store(value, _element(builder, kind, *place), align=bits // 8)

    @intrinsic
    def poke(typingctx, address, value):
        return types.void(types.int64, number), codegen

    @intrinsic
    def poke_at(typingctx, address, j, value):
        return types.void(types.int64, types.int64, number), codegen

    return poke, poke_at


(peek64, _), (peek32, peek32_at), (peek16, _), (peek8, _) = (_loads(bits) for bits in (64, 32, 16, 8))
(poke64, _), (poke32, poke32_at), (poke16, poke16_at) = (_stores(bits) for bits in (64, 32, 16))
as_float, as_bits = reinterpret(types.uint32, types.float32), reinterpret(types.float32, types.uint32)


def _pinned(name: str) -> Any:
    """One fp32 operation that the optimizer may not contract or reassociate."""

    @intrinsic
    def operation(typingctx, x, y):
        def codegen(context, builder, signature, args):
            return getattr(builder, name)(*args)

        return types.float32(types.float32, types.float32), codegen

    return operation


add32, mul32, divide = _pinned("fadd"), _pinned("fmul"), _pinned("fdiv")  # divide: without Python's exception


@njit
def half_to_float_bits(h):
    """fp16 bits to fp32 bits, exact."""
    sign = (h & types.uint32(0x8000)) << types.uint32(16)
    rest = h & types.uint32(0x7FFF)
    shifted = rest << types.uint32(13)
    scaled = as_bits(mul32(as_float(shifted), as_float(types.uint32((127 + 112) << 23))))
    if rest >= types.uint32(0x7C00):
        scaled = shifted | types.uint32(0x7F800000)
    return scaled | sign


@njit
def float_to_half_bits(u):
    """fp32 bits to fp16 bits, to nearest even; NaN becomes the canonical one."""
    sign = (u >> types.uint32(16)) & types.uint32(0x8000)
    mag = u & types.uint32(0x7FFFFFFF)
    # Normal range: rebias and round on the 13 dropped bits.
    rounded = mag + types.uint32(0xFFF) + ((mag >> types.uint32(13)) & types.uint32(1))
    normal = (rounded - types.uint32(112 << 23)) >> types.uint32(13)
    # Subnormal range: adding 0.5 leaves the significand, rounded to nearest even, in the low bits.
    small = as_bits(add32(as_float(mag), as_float(types.uint32(0x3F000000)))) - types.uint32(0x3F000000)
    result = small if mag < types.uint32(113 << 23) else normal
    result = types.uint32(0x7C00) if rounded >= types.uint32(143 << 23) else result
    return types.uint32(0x7FFF) if mag > types.uint32(0x7F800000) else sign | result


@njit(inline="always")
def float_to_bfloat_bits(u):
    """fp32 bits to bf16 bits, to nearest even; NaN becomes the canonical one."""
    nan = (u & types.uint32(0x7FFFFFFF)) > types.uint32(0x7F800000)
    rounded = (u + types.uint32(0x7FFF) + ((u >> types.uint32(16)) & types.uint32(1))) >> types.uint32(16)
    return types.uint32(0x7FFF) if nan else rounded


@njit(inline="always")
def load_element(address, element):
    """fp32 value of one element. Not a part of its own: with one, rows of far elements take twice as long."""
    if element == FLOAT32:
        return as_float(peek32(address))
    if element == BFLOAT16:
        return as_float(types.uint32(peek16(address)) << types.uint32(16))
    return as_float(half_to_float_bits(types.uint32(peek16(address))))


@njit
def store_element(value, address, element):
    """Round to the element type and store."""
    if element == FLOAT32:
        poke32(address, as_bits(value) if value == value else types.uint32(CANONICAL_NAN))
    elif element == BFLOAT16:
        poke16(address, types.uint16(float_to_bfloat_bits(as_bits(value))))
    else:
        poke16(address, types.uint16(float_to_half_bits(as_bits(value))))


@njit
def _lane(base, j):
    """fp32 number j of a row of accumulators."""
    return as_float(peek32_at(base, j))


@njit
def _scale(acc, columns, alpha):
    for j in range(columns):
        poke32_at(acc, j, as_bits(mul32(alpha, _lane(acc, j))))


@njit
def _add(acc, columns, source, stride, element, factor):
    """acc += factor * source, two roundings; a factor of 1 leaves the product out."""
    unit = factor == types.float32(1.0)
    if element == FLOAT32 and stride == 4:
        for j in range(columns):
            x = _lane(source, j)
            poke32_at(acc, j, as_bits(add32(_lane(acc, j), x if unit else mul32(factor, x))))
        return
    for j in range(columns):
        x = load_element(source + j * stride, element)
        poke32_at(acc, j, as_bits(add32(_lane(acc, j), x if unit else mul32(factor, x))))


@njit
def round_row(acc, columns, out, stride, element):
    """Round a row once into the output; contiguous rows in loops that vectorize."""
    if element == FLOAT32 and stride == 4:
        for j in range(columns):
            v = peek32_at(acc, j)
            poke32_at(out, j, types.uint32(CANONICAL_NAN) if (v & 0x7FFFFFFF) > 0x7F800000 else v)
    elif element == BFLOAT16 and stride == 2:
        for j in range(columns):
            poke16_at(out, j, types.uint16(float_to_bfloat_bits(peek32_at(acc, j))))
    elif element == FLOAT16 and stride == 2:
        for j in range(columns):
            poke16_at(out, j, types.uint16(float_to_half_bits(peek32_at(acc, j))))
    else:
        for j in range(columns):
            store_element(_lane(acc, j), out + j * stride, element)


@njit
def epilogue_tile(d, acc, acc_rs, i0, rows, j0, columns):
    """Apply the epilogue of descriptor `d` to an accumulator tile whose corner is output element (i0, j0).

    The accumulators are overwritten on the way.
    """
    one = types.float32(1.0)
    alpha, beta = as_float(types.uint32(d[f.ALPHA])), as_float(types.uint32(d[f.BETA]))
    for i in range(rows):
        row = acc + i * acc_rs
        if d[f.ALPHA] != f.ONE:
            _scale(row, columns, alpha)
        if beta != types.float32(0.0):
            c = d[f.C] + (i0 + i) * d[f.C_RS] + j0 * d[f.C_CS]
            _add(row, columns, c, d[f.C_CS], d[f.C_E], beta)
        if d[f.BIAS] != 0:
            b = d[f.BIAS] + (i0 + i) * d[f.BIAS_RS] + j0 * d[f.BIAS_CS]
            _add(row, columns, b, d[f.BIAS_CS], d[f.BIAS_E], one)
        round_row(row, columns, d[f.OUT] + (i0 + i) * d[f.O_RS] + j0 * d[f.O_CS], d[f.O_CS], d[f.O_E])
