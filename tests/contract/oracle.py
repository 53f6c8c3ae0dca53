"""A second implementation of the contracts, over integers and fractions: nothing of it is shared with the package.

Numbers are ``(kind, sign, Fraction)`` with kind "finite", "inf" or "nan"; results are float32 bit patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

NAN, INF, SIGN = 0x7FFFFFFF, 0x7F800000, 0x80000000
Number = tuple[str, int, Fraction]

# name of the format: exponent bits, fraction bits
FORMATS = {"float32": (8, 23), "tf32": (8, 10), "bfloat16": (8, 7), "float16": (5, 10)}


def read(bits: int, fmt: str) -> tuple[Number, int]:
    """A bit pattern as a number, and the exponent of its significand's unit place as it is stored."""
    exponent_bits, fraction_bits = FORMATS[fmt]
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1 if bits >> (exponent_bits + fraction_bits) else 1
    field = (bits >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    if field == (1 << exponent_bits) - 1:
        return ("nan" if fraction else "inf", sign, Fraction(0)), 0
    significand = fraction if field == 0 else fraction + (1 << fraction_bits)
    exponent = max(field, 1) - bias
    return ("finite", sign, sign * Fraction(significand, 1 << fraction_bits) * power(exponent)), exponent


def power(e: int) -> Fraction:
    return Fraction(1 << e) if e >= 0 else Fraction(1, 1 << -e)


def leading(x: Fraction) -> int:
    """floor(log2 |x|) of a nonzero fraction."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e if abs(x) >= power(e) else e - 1


def toward_zero(x: Fraction) -> int:
    return -(-x.numerator // x.denominator) if x < 0 else x.numerator // x.denominator


def to_float32(x: Fraction, *, nearest: bool, fraction_bits: int = 23, negative_zero: bool = False) -> int:
    """float32 bits of a fraction, rounded to nearest even or toward zero; 2**128 and more is infinite."""
    if x == 0:
        return SIGN if negative_zero else 0
    quantum = power(max(leading(x), -126) - fraction_bits)
    steps = round(abs(x) / quantum) if nearest else toward_zero(abs(x) / quantum)  # round() is to nearest even
    value = steps * quantum
    if steps == 0:
        magnitude = 0
    elif value >= power(128):
        magnitude = INF
    elif value < power(-126):
        magnitude = int(value / power(-149))
    else:
        e = leading(value)
        magnitude = ((e + 127) << 23) | (int(value / power(e - 23)) - (1 << 23))
    return magnitude | (SIGN if x < 0 else 0)


def special_sum(terms: Sequence[Number]) -> int | None:
    """NaN or an infinity where IEEE's rules make the sum one, else None."""
    signs = {sign for kind, sign, _ in terms if kind == "inf"}
    if any(kind == "nan" for kind, _, _ in terms) or len(signs) == 2:
        return NAN
    return (INF | (SIGN if -1 in signs else 0)) if signs else None


def product(x: Number, y: Number) -> Number:
    kinds = {x[0], y[0]}
    if "nan" in kinds:
        return "nan", 1, Fraction(0)
    if "inf" in kinds:
        zero = any(n[0] == "finite" and n[2] == 0 for n in (x, y))
        return ("nan" if zero else "inf"), x[1] * y[1], Fraction(0)
    return "finite", x[1] * y[1], x[2] * y[2]


def fused_sum(xs: Sequence[int], ys: Sequence[int], c: int, fmt: str, bits: int) -> int:
    """One block of a tensor core and the accumulator c, as float32 bits."""
    start, start_exponent = read(c, "float32")
    terms, exponents = [start], [start_exponent] if start[2] else []
    for x, y in zip(xs, ys, strict=True):
        (left, left_exponent), (right, right_exponent) = read(x, fmt), read(y, fmt)
        terms.append(product(left, right))
        if terms[-1][2]:
            exponents.append(left_exponent + right_exponent)
    special = special_sum(terms)
    if special is not None:
        return special
    unit = power(max([*exponents, -133]) - bits)
    total = sum(toward_zero(value / unit) for _, _, value in terms)
    rounded = to_float32(total * unit, nearest=False)
    return 0 if rounded == SIGN else rounded


def fma(x: int, y: int, z: int) -> int:
    """IEEE 754 fusedMultiplyAdd of float32 bits, to nearest even."""
    start, _ = read(z, "float32")
    term = product(read(x, "float32")[0], read(y, "float32")[0])
    special = special_sum([term, start])
    if special is not None:
        return special
    both_negative = term[1] < 0 and start[1] < 0
    if term[2] == 0 and start[2] == 0:
        return SIGN if both_negative else 0
    return to_float32(term[2] + start[2], nearest=True)


def add(x: int, y: int) -> int:
    return fma(x, 0x3F800000, y)


def tf32(bits: int) -> int:
    """The tf32 pattern, 19 bits, nearest to a float32: to nearest even."""
    (kind, _, value), _ = read(bits, "float32")
    if kind == "nan":
        return 0x3FFFF
    if kind == "inf" or value == 0:
        return bits >> 13
    return to_float32(value, nearest=True, fraction_bits=10) >> 13


def chain(xs: Sequence[int], ys: Sequence[int], c: int, fmt: str, block: int, bits: int) -> int:
    if fmt == "float32":
        for x, y in zip(xs, ys, strict=True):
            c = fma(x, y, c)
        return c
    for i in range(0, len(xs), block):
        c = fused_sum(xs[i : i + block], ys[i : i + block], c, fmt, bits)
    return c


def dot(xs: Sequence[int], ys: Sequence[int], fmt: str, block: int, bits: int, order: str, c: int | None = None) -> int:
    """One element under a contract; operands are float32, bfloat16 or float16 bits as `fmt` says."""
    if fmt == "tf32":
        xs, ys = [tf32(x) for x in xs], [tf32(y) for y in ys]
    if order == "chain":
        return chain(xs, ys, c or 0, fmt, block, bits)
    k = len(xs)
    if order.startswith("leaf"):
        length, total = int(order[4:]), c or 0
        for i in range(0, k, length):
            total = add(total, chain(xs[i : i + length], ys[i : i + length], 0, fmt, block, bits))
        return total
    count = int(order[4:])
    length = block
    while length * count < k:
        length += block
    sums = [chain(xs[i * length :][:length], ys[i * length :][:length], 0, fmt, block, bits) for i in range(count)]
    while len(sums) > 1:
        sums = [add(sums[i], sums[i + 1]) for i in range(0, len(sums), 2)]
    return sums[0]


def matmul(a: Any, b: Any, fmt: str, block: int, bits: int, order: str, c: Any = None) -> Any:
    """Bits of a product of two matrices of bits, as uint32."""
    out = np.empty((a.shape[0], b.shape[1]), np.uint32)
    for i, j in np.ndindex(out.shape):
        start = None if c is None else int(c[i, j])
        out[i, j] = dot(a[i].tolist(), b[:, j].tolist(), fmt, block, bits, order, start)
    out[(out & 0x7FFFFFFF) > INF] = NAN
    return out
