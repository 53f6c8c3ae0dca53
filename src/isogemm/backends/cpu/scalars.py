"""Single elements by address: loads with exact widening, stores with one rounding, and the epilogue of a tile.

    v = acc;  v = alpha * v;  v = v + beta * c;  v = v + bias;  out = round(v)

Every step rounds once, in fp32, in this order; steps whose scalar is 1 (alpha) or 0 (beta) do not happen.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ...jit import njit
from . import fields as f
from .vectors import BFLOAT16, CANONICAL_NAN, FLOAT32

__all__ = ["epilogue_tile", "load_element", "store_element"]


def _memory(kind: Any, write: bool) -> Any:
    """Load or store of one scalar at an address."""
    numba_type = {32: types.uint32, 16: types.uint16}[kind.width]

    if write:

        @intrinsic  # type: ignore[untyped-decorator]
        def poke(typingctx, address, value):  # type: ignore[no-untyped-def]
            def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
                builder.store(args[1], builder.inttoptr(args[0], ir.PointerType(kind)), align=kind.width // 8)

            return types.void(types.int64, numba_type), codegen

        return poke

    @intrinsic  # type: ignore[untyped-decorator]
    def peek(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.load(builder.inttoptr(args[0], ir.PointerType(kind)), align=kind.width // 8, typ=kind)

        return numba_type(types.int64), codegen

    return peek


peek32, peek16 = _memory(ir.IntType(32), False), _memory(ir.IntType(16), False)
poke32, poke16 = _memory(ir.IntType(32), True), _memory(ir.IntType(16), True)


@intrinsic  # type: ignore[untyped-decorator]
def as_float(typingctx, bits):  # type: ignore[no-untyped-def]
    """The fp32 with these bits."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def as_bits(typingctx, value):  # type: ignore[no-untyped-def]
    """The bits of an fp32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


def _pinned(name: str) -> Any:
    """One fp32 operation that the optimizer may not contract or reassociate."""

    @intrinsic  # type: ignore[untyped-decorator]
    def operation(typingctx, x, y):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return getattr(builder, name)(*args)

        return types.float32(types.float32, types.float32), codegen

    return operation


add32, mul32 = _pinned("fadd"), _pinned("fmul")


@njit(inline="always")
def half_to_float_bits(h):  # type: ignore[no-untyped-def]
    """fp16 bits to fp32 bits, exact."""
    sign = (h & types.uint32(0x8000)) << types.uint32(16)
    rest = h & types.uint32(0x7FFF)
    shifted = rest << types.uint32(13)
    scaled = as_bits(mul32(as_float(shifted), as_float(types.uint32((127 + 112) << 23))))
    if rest >= types.uint32(0x7C00):
        scaled = shifted | types.uint32(0x7F800000)
    return scaled | sign


@njit(inline="always")
def float_to_half_bits(u):  # type: ignore[no-untyped-def]
    """fp32 bits to fp16 bits, to nearest even; NaN becomes the canonical one."""
    sign = (u >> types.uint32(16)) & types.uint32(0x8000)
    mag = u & types.uint32(0x7FFFFFFF)
    # Normal range: rebias and round on the 13 dropped bits.
    rounded = mag + types.uint32(0xFFF) + ((mag >> types.uint32(13)) & types.uint32(1))
    normal = (rounded - types.uint32(112 << 23)) >> types.uint32(13)
    # Subnormal range: adding 0.5 leaves the significand, rounded to nearest even, in the low bits.
    small = as_bits(add32(as_float(mag), as_float(types.uint32(0x3F000000)))) - types.uint32(0x3F000000)
    result = small if mag < types.uint32(113 << 23) else normal
    if rounded >= types.uint32(143 << 23):
        result = types.uint32(0x7C00)
    if mag > types.uint32(0x7F800000):
        return types.uint32(0x7FFF)
    return sign | result


@njit(inline="always")
def float_to_bfloat_bits(u):  # type: ignore[no-untyped-def]
    """fp32 bits to bf16 bits, to nearest even; NaN becomes the canonical one."""
    if (u & types.uint32(0x7FFFFFFF)) > types.uint32(0x7F800000):
        return types.uint32(0x7FFF)
    return (u + types.uint32(0x7FFF) + ((u >> types.uint32(16)) & types.uint32(1))) >> types.uint32(16)


@njit(inline="always")
def load_element(address, element):  # type: ignore[no-untyped-def]
    """fp32 value of one element."""
    if element == FLOAT32:
        return as_float(peek32(address))
    if element == BFLOAT16:
        return as_float(types.uint32(peek16(address)) << types.uint32(16))
    return as_float(half_to_float_bits(types.uint32(peek16(address))))


@njit(inline="always")
def store_element(value, address, element):  # type: ignore[no-untyped-def]
    """Round to the element type and store."""
    if element == FLOAT32:
        poke32(address, as_bits(value) if value == value else types.uint32(CANONICAL_NAN))
    elif element == BFLOAT16:
        poke16(address, types.uint16(float_to_bfloat_bits(as_bits(value))))
    else:
        poke16(address, types.uint16(float_to_half_bits(as_bits(value))))


@njit
def epilogue_tile(d, acc, acc_rs, i0, rows, j0, columns):  # type: ignore[no-untyped-def]
    """Apply the epilogue of descriptor `d` to an accumulator tile whose corner is output element (i0, j0)."""
    alpha, beta = as_float(types.uint32(d[f.ALPHA])), as_float(types.uint32(d[f.BETA]))
    scaled, has_c, unit_beta = d[f.ALPHA] != f.ONE, beta != types.float32(0.0), d[f.BETA] == f.ONE
    bias, bias_rs, bias_cs, bias_e = d[f.BIAS], d[f.BIAS_RS], d[f.BIAS_CS], d[f.BIAS_E]
    c_rs, c_cs, c_e = d[f.C_RS], d[f.C_CS], d[f.C_E]
    o_cs, o_e = d[f.O_CS], d[f.O_E]
    for i in range(rows):
        source = acc + i * acc_rs
        c = d[f.C] + (i0 + i) * c_rs + j0 * c_cs
        b = bias + (i0 + i) * bias_rs + j0 * bias_cs
        o = d[f.OUT] + (i0 + i) * d[f.O_RS] + j0 * o_cs
        for j in range(columns):
            v = as_float(peek32(source + 4 * j))
            if scaled:
                v = mul32(alpha, v)
            if has_c:
                x = load_element(c + j * c_cs, c_e)
                v = add32(v, x if unit_beta else mul32(beta, x))
            if bias != 0:
                v = add32(v, load_element(b + j * bias_cs, bias_e))
            store_element(v, o + j * o_cs, o_e)
