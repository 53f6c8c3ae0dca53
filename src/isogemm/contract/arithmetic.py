"""What happens along one chain: the arithmetics of contracts as Numba code, written to be read as their definition.

Numba is loaded with this module, so it is imported when the first product is evaluated and not before.
Everything works on float32 operands, to which bfloat16, float16 and tf32 convert exactly. The inner loops run over the
columns of one row, which are independent of each other, so vector width cannot reach the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from ..base.jit import njit

# Terms are never aligned to a smaller exponent than this: measured on an H200 with sums about 2**-149, where -134 and
# -132 both miss bits. See docs/design/0002-tensor-core-model.md.
EXPONENT_FLOOR = -133
_COLUMNS = 128  # columns of one tile: a block of operands and the scratch rows stay in the first-level cache


@intrinsic  # type: ignore[untyped-decorator]
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in float32 with one rounding, to nearest even."""
    f32 = types.float32

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return f32(f32, f32, f32), codegen


def reinterpret(source: Any, target: Any) -> Any:
    """The number of type `target` that has the bits of one of type `source`, as a function of compiled code."""

    @intrinsic  # type: ignore[untyped-decorator]
    def other(typing: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return other


_bits32 = reinterpret(types.float32, types.int32)
_bits64 = reinterpret(types.float64, types.int64)
_double = reinterpret(types.int64, types.float64)


@njit
def _power_of_two(e):  # type: ignore[no-untyped-def]
    """2**e as a float64, for -1022 <= e <= 1023."""
    return _double((np.int64(e) + 1023) << 52)


@njit
def _exponent(x):  # type: ignore[no-untyped-def]
    """The exponent of an accumulator: of its leading bit when normal, -126 when subnormal, the floor when zero."""
    bits = _bits32(x) & 0x7FFFFFFF
    if bits == 0:
        return np.int32(EXPONENT_FLOOR)
    return np.int32(max(bits >> 23, 1) - 127)


@njit
def _truncate(v):  # type: ignore[no-untyped-def]
    """A float64 truncated toward zero to a float32: 24 significant bits, or a multiple of 2**-149 below 2**-126.

    Zero is +0. A magnitude of 2**128 or more is infinite. Infinities and NaN pass.
    """
    if np.abs(v) < 2.0**-126:
        return np.float32(np.trunc(v * 2.0**149) * 2.0**-149 + 0.0)
    if np.abs(v) < 2.0**128:
        return np.float32(_double(_bits64(v) & np.int64(-1 << 29)))
    return np.float32(v)


@njit
def fma_chain(a, b, acc, start, stop, first, last):  # type: ignore[no-untyped-def]
    """``acc[i, j] = fma(a[i, p], b[p, j], acc[i, j])`` for p ascending in [start, stop), j in [first, last).

    a is [m, k], b [k, n] and acc [m, n], float32 and C-contiguous; acc holds the start of the chains.
    """
    for i in range(a.shape[0]):
        for p in range(start, stop):
            x = a[i, p]
            for j in range(first, last):
                acc[i, j] = fma(x, b[p, j], acc[i, j])


@njit
def fma_elements(x, y, z, out):  # type: ignore[no-untyped-def]
    """``out[i] = fma(x[i], y[i], z[i])``, one-dimensional float32."""
    for i in range(out.size):
        out[i] = fma(x[i], y[i], z[i])


@njit
def fused_chain(a, a_exponent, b, b_exponent, acc, start, stop, first, last, block, fraction_bits):  # type: ignore[no-untyped-def]
    """Fused sums of `block` products and the accumulator, for blocks ascending in [start, stop), j in [first, last).

    Shapes as in `fma_chain`, exponents int32 beside their operands; a last block partly outside the range is
    filled with zero terms, which are those that are not visited here.
    """
    for left in range(first, last, _COLUMNS):
        right = min(left + _COLUMNS, last)
        for p in range(start, stop, block):
            q = min(p + block, stop)
            for i in range(a.shape[0]):
                _fused_sum(a[i], a_exponent[i], b, b_exponent, acc[i], p, q, left, right, fraction_bits)


@njit
def _fused_sum(a, a_exponent, b, b_exponent, acc, start, stop, first, last, fraction_bits):  # type: ignore[no-untyped-def]
    """One block of one row. float64 carries it exactly, infinities and NaN included.

    A product of two operands of at most 11 bits is exact in float64, and so is a sum of a few terms that are multiples
    of one unit, 2**(largest - fraction_bits), and less than 2**(fraction_bits + 2) units each.
    """
    columns = last - first
    largest = np.empty(_COLUMNS, np.int32)
    scale = np.empty(_COLUMNS, np.float64)
    total = np.empty(_COLUMNS, np.float64)
    for j in range(columns):  # 1. the largest exponent among the products, not renormalised, and the accumulator
        largest[j] = _exponent(acc[first + j])
    for p in range(start, stop):
        e = a_exponent[p]
        for j in range(columns):
            largest[j] = max(largest[j], e + b_exponent[p, first + j])
    for j in range(columns):  # 2. every term in units of 2**(largest - fraction_bits), truncated toward zero
        scale[j] = _power_of_two(fraction_bits - largest[j])
        total[j] = np.trunc(np.float64(acc[first + j]) * scale[j])
    for p in range(start, stop):  # 3. added exactly, so that order inside the block does not matter
        x = np.float64(a[p])
        for j in range(columns):
            total[j] += np.trunc(x * np.float64(b[p, first + j]) * scale[j])
    for j in range(columns):  # 4. normalised and truncated to float32
        acc[first + j] = _truncate(total[j] * _power_of_two(largest[j] - fraction_bits))
