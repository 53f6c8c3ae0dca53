"""Super-blocks of 256 quantized, as ggml's reference does it: the scale of each sub-block by a search.

Codes with a minimum (2, 4 and 5 bits): for a number of trial scales, codes are rounded, the best scale and minimum for
these codes follow from weighted least squares, and the trial of the least weighted error is kept. Codes without one
(6 bits): the same, without a minimum. 3 bits: coordinate descent on the codes. Scales are then rounded to integers
against the largest, and codes are rounded again with the scales as stored.

All sums run in ascending order in float32, each step rounded, nothing contracted: ggml's own bits depend on whether
its compiler fused multiplications and additions.
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from .....base.jit import njit
from ...emit.scalars import add32, as_bits
from ..blocks import finite, half, put_half, scales_of_q3, scales_of_q4

F = types.float32
ZERO, ONE = F(0), F(1)
SMALLEST = F(1e-15)  # sub-blocks below are zero
TENTH = F(0.1)
# Scratch: codes [256] and trial codes [32] of int8, scales [16], minima [16] and weights [32] of float32, and integer
# scales [16] and offsets [16].
CODES_AT, TRIAL_AT, SCALES_AT, MINS_AT, WEIGHTS_AT, S_AT, T_AT = 0, 256, 288, 352, 416, 544, 608


@njit(inline="always")
def _nearest(x):
    """The nearest integer, halves to even, for |x| < 2**22."""
    bits = as_bits(add32(x, F(12582912)))
    return types.int32(bits & types.uint32(0x7FFFFF)) - types.int32(0x400000)


@njit(inline="always")
def _clamped(x, low, high):
    return max(types.int32(low), min(types.int32(high), x))


@njit
def _stored(p, at, x):
    """x as float16 into bytes at, at + 1; what that is as float32."""
    put_half(p, at, x)
    return half(p, at)


@njit
def _error(x, codes, weights, scale, low, mad):
    total = ZERO
    for i in range(x.size):
        diff = scale * F(codes[i]) + low - x[i]
        total += weights[i] * (abs(diff) if mad else diff * diff)
    return total


@njit(error_model="numpy")
def _fit_with_minimum(x, codes, trial, weights, most, first, step, steps, mad):
    """(scale, -minimum) of a sub-block: the best of `steps` + 1 trials, and its codes."""
    n = x.size
    low = high = x[0]
    sum_w = weights[0]
    sum_x = sum_w * x[0]
    for i in range(1, n):
        low, high = (x[i] if x[i] < low else low), (x[i] if x[i] > high else high)
        sum_w += weights[i]
        sum_x += weights[i] * x[i]
    low = ZERO if low > ZERO else low
    if high == low:
        for i in range(n):
            codes[i] = 0
        return ZERO, -low
    span = high - low
    inverse = F(most) / span
    scale, start = ONE / inverse, low
    for i in range(n):
        codes[i] = types.int8(_clamped(_nearest(inverse * (x[i] - start)), 0, most))
    best = _error(x, codes, weights, scale, low, mad)
    for turn in range(steps + 1):
        inverse = (first + step * F(turn) + F(most)) / (high - low)
        sum_l = sum_l2 = sum_xl = ZERO
        for i in range(n):
            code = _clamped(_nearest(inverse * (x[i] - low)), 0, most)
            trial[i] = types.int8(code)
            weighted = weights[i] * F(code)
            sum_l += weighted
            sum_l2 += weighted * F(code)
            sum_xl += weighted * x[i]
        det = sum_w * sum_l2 - sum_l * sum_l
        if det > ZERO:
            this_scale = (sum_w * sum_xl - sum_x * sum_l) / det
            this_low = (sum_l2 * sum_x - sum_l * sum_xl) / det
            if this_low > ZERO:
                this_low, this_scale = ZERO, sum_xl / sum_l2
            error = _error(x, trial, weights, this_scale, this_low, mad)
            if error < best:
                for i in range(n):
                    codes[i] = trial[i]
                best, scale, low = error, this_scale, this_low
    return scale, -low


@njit
def _peak(x):
    """The first element of the largest magnitude."""
    largest = peak = ZERO
    for i in range(x.size):
        if abs(x[i]) > largest:
            largest, peak = abs(x[i]), x[i]
    return peak


@njit(error_model="numpy")
def _fit(x, codes, bound):
    """Scale of a sub-block with codes in [-bound, bound), weighted by x**2; codes are stored plus `bound`."""
    n, peak = x.size, _peak(x)
    for i in range(n):
        codes[i] = 0
    if abs(peak) < SMALLEST:
        return ZERO
    scale = best = ZERO
    for turn in range(19):
        trial = 0 if turn == 0 else (turn - 10 if turn < 10 else turn - 9)
        inverse = -(F(bound) + TENTH * F(trial)) / peak if turn else -F(bound) / peak
        sum_lx = sum_l2 = ZERO
        for i in range(n):
            code = F(_clamped(_nearest(inverse * x[i]), -bound, bound - 1))
            weight = x[i] * x[i]
            sum_lx += weight * x[i] * code
            sum_l2 += weight * code * code
        if turn == 0 or (sum_l2 > ZERO and sum_lx * sum_lx > best * sum_l2):
            for i in range(n):
                codes[i] = types.int8(bound + _clamped(_nearest(inverse * x[i]), -bound, bound - 1))
            scale = sum_lx / sum_l2 if sum_l2 != ZERO else ZERO
            best = scale * sum_lx
    return scale


@njit(error_model="numpy")
def _descend(x, codes, bound):
    """The same by coordinate descent: a code moves where that lowers the weighted error."""
    n, peak = x.size, _peak(x)
    for i in range(n):
        codes[i] = 0
    if abs(peak) < SMALLEST:
        return ZERO
    inverse = -F(bound) / peak
    sum_lx = sum_l2 = ZERO
    for i in range(n):
        code = _clamped(_nearest(inverse * x[i]), -bound, bound - 1)
        codes[i] = types.int8(code)
        weight = x[i] * x[i]
        sum_lx += weight * x[i] * F(code)
        sum_l2 += weight * F(code) * F(code)
    for _ in range(5):
        changed = False
        for i in range(n):
            weight, old = x[i] * x[i], F(codes[i])
            lx = sum_lx - weight * x[i] * old
            if lx > ZERO:
                l2 = sum_l2 - weight * old * old
                code = _clamped(_nearest(x[i] * l2 / lx), -bound, bound - 1)
                if code != types.int32(codes[i]):
                    lx += weight * x[i] * F(code)
                    l2 += weight * F(code) * F(code)
                    if l2 > ZERO and lx * lx * sum_l2 > sum_lx * sum_lx * l2:
                        codes[i] = types.int8(code)
                        sum_lx, sum_l2, changed = lx, l2, True
        if not changed:
            break
    for i in range(n):
        codes[i] += types.int8(bound)
    return sum_lx / sum_l2 if sum_l2 > ZERO else ZERO


@njit(error_model="numpy")
def _round_again(x, codes, sub, d, o, s, t, low, high, zero):
    """Codes for the scales as they are stored; where a scale is 0 the searched codes stay."""
    for j in range(256 // sub):
        scale, shift = d * F(s[j]), o * F(t[j])
        if scale != ZERO:
            for i in range(j * sub, (j + 1) * sub):
                codes[i] = types.int8(_clamped(_nearest((x[i] + shift) / scale), low, high) + zero)


@njit
def _all_finite(x, count):
    """Whether the search found numbers: squares of weights beyond 2**42 overflow."""
    found = True
    for j in range(count):
        found = found and finite(x[j])
    return found


@njit
def _store_pairs(p, at, codes, low):
    """Bits `low` and `low` + 1: pair g of byte j is of code 32 g + j of each half."""
    for chunk in range(2):
        for j in range(32):
            byte = 0
            for g in range(4):
                byte |= ((types.int32(codes[128 * chunk + 32 * g + j]) >> low) & 3) << (2 * g)
            p[at + 32 * chunk + j] = types.uint8(byte)


@njit
def _store_high(p, at, codes, low):
    """Bits from `low` on: bit g of byte j is of code 32 g + j."""
    for j in range(32):
        byte = 0
        for g in range(8):
            byte |= (types.int32(codes[32 * g + j]) >> low) << g
        p[at + j] = types.uint8(byte)


@njit(error_model="numpy")
def q2(x, p, codes, trial, scales, mins, weights, s, t):
    top = top_min = ZERO
    for j in range(16):
        part = x[16 * j : 16 * j + 16]
        for i in range(16):
            weights[i] = abs(part[i])
        scales[j], mins[j] = _fit_with_minimum(
            part, codes[16 * j : 16 * j + 16], trial, weights[:16], 3, F(-0.5), TENTH, 15, True
        )
        top, top_min = max(top, scales[j]), max(top_min, mins[j])
    d = _stored(p, 80, top / F(15) if top > ZERO else ZERO)
    o = _stored(p, 82, top_min / F(15) if top_min > ZERO else ZERO)
    for j in range(16):
        s[j] = _nearest(F(15) / top * scales[j]) if top > ZERO else 0
        t[j] = _nearest(F(15) / top_min * mins[j]) if top_min > ZERO else 0
        p[j] = types.uint8((s[j] | (t[j] << 4)) & 255)
        s[j], t[j] = types.int32(p[j] & 15), types.int32(p[j] >> 4)
    _round_again(x, codes, 16, d, o, s, t, 0, 3, 0)
    _store_pairs(p, 16, codes, 0)
    return finite(d) and finite(o) and _all_finite(scales, 16) and _all_finite(mins, 16)


@njit(error_model="numpy")
def q3(x, p, codes, trial, scales, mins, weights, s, t):
    top = ZERO
    for j in range(16):
        scales[j] = _descend(x[16 * j : 16 * j + 16], codes[16 * j : 16 * j + 16], 4)
        top = scales[j] if abs(scales[j]) > abs(top) else top
    for j in range(96, 108):
        p[j] = 0
    d = ZERO
    if top != ZERO:
        inverse = F(-32) / top
        for j in range(16):
            code = _clamped(_nearest(inverse * scales[j]), -32, 31) + 32
            p[96 + j % 8] |= types.uint8((code & 15) << (4 * (j // 8)))
            p[104 + j % 4] |= types.uint8((code >> 4) << (2 * (j // 4)))
        d = ONE / inverse
    d = _stored(p, 108, d)
    scales_of_q3(p, s)
    for j in range(16):
        t[j] = 0
    _round_again(x, codes, 16, d, ZERO, s, t, -4, 3, 4)
    _store_high(p, 0, codes, 2)
    _store_pairs(p, 32, codes, 0)
    return finite(d) and _all_finite(scales, 16)


@njit(error_model="numpy")
def q45(five, x, p, codes, trial, scales, mins, weights, s, t):
    top = top_min = ZERO
    most = 31 if five else 15
    for j in range(8):
        part = x[32 * j : 32 * j + 32]
        squares = ZERO
        for i in range(32):
            squares += part[i] * part[i]
        average = np.sqrt(squares / F(32))
        for i in range(32):
            weights[i] = average + abs(part[i])
        scales[j], mins[j] = _fit_with_minimum(
            part, codes[32 * j : 32 * j + 32], trial, weights, most, F(-0.5 if five else -1), TENTH,
            15 if five else 20, False,
        )  # fmt: skip
        top, top_min = max(top, scales[j]), max(top_min, mins[j])
    inverse = F(63) / top if top > ZERO else ZERO
    inverse_min = F(63) / top_min if top_min > ZERO else ZERO
    for j in range(8):
        s[j] = min(types.int32(63), _nearest(inverse * scales[j]) & 255)
        t[j] = min(types.int32(63), _nearest(inverse_min * mins[j]) & 255)
    for j in range(4):
        p[4 + j] = types.uint8(s[j] | ((s[4 + j] >> 4) << 6))
        p[8 + j] = types.uint8(t[j] | ((t[4 + j] >> 4) << 6))
        p[12 + j] = types.uint8((s[4 + j] & 15) | ((t[4 + j] & 15) << 4))
    d, o = _stored(p, 0, top / F(63)), _stored(p, 2, top_min / F(63))
    scales_of_q4(p, s, t)
    _round_again(x, codes, 32, d, o, s, t, 0, most, 0)
    at = 48 if five else 16
    for chunk in range(4):
        for j in range(32):
            low, high = types.int32(codes[64 * chunk + j]), types.int32(codes[64 * chunk + 32 + j])
            p[at + 32 * chunk + j] = types.uint8((low & 15) | ((high & 15) << 4))
    if five:
        _store_high(p, 16, codes, 4)
    return finite(d) and finite(o) and _all_finite(scales, 8) and _all_finite(mins, 8)


@njit(error_model="numpy")
def q6(x, p, codes, trial, scales, mins, weights, s, t):
    top = ZERO
    for j in range(16):
        scales[j] = _fit(x[16 * j : 16 * j + 16], codes[16 * j : 16 * j + 16], 32)
        top = scales[j] if abs(scales[j]) > abs(top) else top
    if abs(top) < SMALLEST:
        for j in range(210):
            p[j] = 0
        return _all_finite(scales, 16)
    inverse = F(-128) / top
    d = _stored(p, 208, ONE / inverse)
    for j in range(16):
        s[j] = min(types.int32(127), _nearest(inverse * scales[j]))
        p[192 + j] = types.uint8(s[j] & 255)
        s[j], t[j] = types.int32(types.int8(p[192 + j])), 0
    _round_again(x, codes, 16, d, ZERO, s, t, -32, 31, 32)
    _store_pairs(p, 128, codes, 4)
    for chunk in range(2):
        for j in range(32):
            for g in range(2):
                low = types.int32(codes[128 * chunk + 32 * g + j]) & 15
                high = types.int32(codes[128 * chunk + 64 + 32 * g + j]) & 15
                p[64 * chunk + 32 * g + j] = types.uint8(low | (high << 4))
    return finite(d) and _all_finite(scales, 16)


@njit(error_model="numpy")
def q8k(x, p):
    """Activations: 127 / -peak to the nearest, halves to even; and sums of sixteen codes."""
    peak = _peak(x)
    inverse = F(-127) / peak if peak != ZERO else ZERO
    usable = peak != ZERO and finite(inverse)
    bits = as_bits(ONE / inverse if usable else ZERO)
    for j in range(4):
        p[j] = types.uint8((bits >> types.uint32(8 * j)) & types.uint32(255))
    for group in range(16):
        total = 0
        for i in range(16 * group, 16 * group + 16):
            code = min(types.int32(127), _nearest(inverse * x[i])) if usable else types.int32(0)
            p[4 + i] = types.uint8(code & 255)
            total += code
        p[260 + 2 * group] = types.uint8(total & 255)
        p[261 + 2 * group] = types.uint8((total >> 8) & 255)
    return True
