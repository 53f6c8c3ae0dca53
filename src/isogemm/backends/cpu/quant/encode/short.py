"""Blocks of 32 quantized, with the bits of the ``gguf`` package.

    symmetric   d = x[peak] / -2**(bits - 1),      q = trunc(x * (1 / d) + zero + 0.5)
    Q8_0        d = max|x| / 127,                  q = round(x * (1 / d)), halves away from zero
    with a minimum   d = (max - min) / (2**bits - 1),  q = trunc((x - min) * (1 / d) + 0.5)

where peak is the first element of the largest magnitude, and 1 / d is 0 where d is. Codes that are not finite are 0.
"""

from __future__ import annotations

from numba.core import types

from .....base.jit import njit
from ..blocks import finite, half, put_half

F = types.float32
ONE, HALF, ZERO = F(1), F(0.5), F(0)


@njit(error_model="numpy", inline="always")
def _inverse(d):
    return ZERO if d == ZERO else ONE / d


@njit(inline="always")
def _truncated(y, most):
    return types.int32(0) if not finite(y) else min(types.int32(y), types.int32(most))


@njit
def _store(p, low, high, codes, five):
    """Codes into nibbles at `low`, and their fifth bits at `high`."""
    for j in range(16):
        p[low + j] = types.uint8((codes[j] & 15) | ((codes[16 + j] & 15) << 4))
    if five:
        for i in range(4):
            byte = 0
            for j in range(8):
                byte |= ((codes[8 * i + j] >> 4) & 1) << j
            p[high + i] = types.uint8(byte)


@njit(error_model="numpy")
def q8(x, p):
    largest = ZERO
    for j in range(32):
        largest = max(largest, abs(x[j]))
    d = largest / F(127)
    r = _inverse(d)
    for j in range(32):
        y = x[j] * r
        whole = types.int32(0)
        if finite(y):
            whole = types.int32(abs(y))
            whole += types.int32(1) if abs(y) - F(whole) >= HALF else types.int32(0)
            whole = -whole if y < ZERO else whole
        p[2 + j] = types.uint8(whole & 255)
    put_half(p, 0, d)
    return finite(half(p, 0))


@njit(error_model="numpy")
def symmetric(x, p, five, codes):
    peak = x[0]
    for j in range(1, 32):
        if abs(x[j]) > abs(peak):
            peak = x[j]
    d = peak / F(-16 if five else -8)
    r = _inverse(d)
    for j in range(32):
        codes[j] = types.int8(_truncated(x[j] * r + F(16.5 if five else 8.5), 31 if five else 15))
    _store(p, 6 if five else 2, 2, codes, five)
    put_half(p, 0, d)
    return finite(half(p, 0))


@njit(error_model="numpy")
def with_minimum(x, p, five, codes):
    low = high = x[0]
    for j in range(1, 32):
        low, high = min(low, x[j]), max(high, x[j])
    d = (high - low) / F(31 if five else 15)
    r = _inverse(d)
    for j in range(32):
        codes[j] = types.int8(_truncated((x[j] - low) * r + HALF, 31 if five else 15))
    _store(p, 8 if five else 4, 4, codes, five)
    put_half(p, 0, d)
    put_half(p, 2, low)
    return finite(half(p, 0)) and finite(half(p, 2))
