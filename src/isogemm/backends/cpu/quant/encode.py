"""Blocks of 32 quantized, with the bits of the ``gguf`` package; and whole matrices, block by block.

    symmetric   d = x[peak] / -2**(bits - 1),      q = trunc(x * (1 / d) + zero + 0.5)
    Q8_0        d = max|x| / 127,                  q = round(x * (1 / d)), halves away from zero
    with a minimum   d = (max - min) / (2**bits - 1),  q = trunc((x - min) * (1 / d) + 0.5)

where peak is the first element of the largest magnitude, and 1 / d is 0 where d is. Codes that are not finite are 0.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray
from numba.core import types

from ....base.jit import compile_entry, njit
from ..emit.scalars import as_bits, float_to_half_bits, load_element, peek64, poke64
from ..gemm.routines import call7
from ..rows.loops import pointer_to_floats
from . import blocks as blocks
from . import encode_k as k
from .blocks import pointer_to_bytes, pointer_to_codes, pointer_to_ints

__all__ = ["address", "encoder"]

F = types.float32
ONE, HALF, ZERO = F(1), F(0.5), F(0)
# Scratch of one thread: a block of float32, then what the super-blocks need.
X_AT, WORK_AT, SCRATCH = 0, 1024, 4096
NOT_FINITE, OVERFLOW = 1, 2


@njit(inline="always")
def put_half(p, at, x):
    """x as float16 into bytes at, at + 1; whether it is finite there."""
    h = float_to_half_bits(as_bits(x))
    p[at], p[at + 1] = types.uint8(h & 255), types.uint8(h >> types.uint32(8))
    return (h & types.uint32(0x7C00)) != types.uint32(0x7C00)


@njit(inline="always")
def _finite(x):
    return (as_bits(x) & types.uint32(0x7F800000)) != types.uint32(0x7F800000)


@njit(error_model="numpy", inline="always")
def _inverse(d):
    return ZERO if d == ZERO else ONE / d


@njit(inline="always")
def _truncated(y, most):
    return types.int32(0) if not _finite(y) else min(types.int32(y), types.int32(most))


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
def _q8(x, p):
    largest = ZERO
    for j in range(32):
        largest = max(largest, abs(x[j]))
    d = largest / F(127)
    r = _inverse(d)
    for j in range(32):
        y = x[j] * r
        whole = types.int32(0)
        if _finite(y):
            whole = types.int32(abs(y))
            whole += types.int32(1) if abs(y) - F(whole) >= HALF else types.int32(0)
            whole = -whole if y < ZERO else whole
        p[2 + j] = types.uint8(whole & 255)
    return put_half(p, 0, d)


@njit(error_model="numpy")
def _symmetric(x, p, five, codes):
    peak = x[0]
    for j in range(1, 32):
        if abs(x[j]) > abs(peak):
            peak = x[j]
    d = peak / F(-16 if five else -8)
    r = _inverse(d)
    for j in range(32):
        codes[j] = types.int8(_truncated(x[j] * r + F(16.5 if five else 8.5), 31 if five else 15))
    _store(p, 6 if five else 2, 2, codes, five)
    return put_half(p, 0, d)


@njit(error_model="numpy")
def _with_minimum(x, p, five, codes):
    low = high = x[0]
    for j in range(1, 32):
        low, high = min(low, x[j]), max(high, x[j])
    d = (high - low) / F(31 if five else 15)
    r = _inverse(d)
    for j in range(32):
        codes[j] = types.int8(_truncated((x[j] - low) * r + HALF, 31 if five else 15))
    _store(p, 8 if five else 4, 4, codes, five)
    good = put_half(p, 0, d)
    return put_half(p, 2, low) and good


# One routine to a format, compiled when it is first asked for: void (x, block, scratch, bytes, 0, 0, 0), which leaves
# in the first word of `scratch` whether the block's scales are finite.


@njit(inline="always")
def _open(x, p, work, size):
    return (
        carray(pointer_to_floats(x), (256,)),
        carray(pointer_to_bytes(p), (size,)),
        carray(pointer_to_codes(work + 8), (256,)),
    )


def _q8_0(x, p, work, size, a, b, c):
    x, p, _ = _open(x, p, work, size)
    poke64(work, types.int64(_q8(x, p)))


def _q4_0(x, p, work, size, a, b, c):
    x, p, codes = _open(x, p, work, size)
    poke64(work, types.int64(_symmetric(x, p, False, codes)))


def _q5_0(x, p, work, size, a, b, c):
    x, p, codes = _open(x, p, work, size)
    poke64(work, types.int64(_symmetric(x, p, True, codes)))


def _q4_1(x, p, work, size, a, b, c):
    x, p, codes = _open(x, p, work, size)
    poke64(work, types.int64(_with_minimum(x, p, False, codes)))


def _q5_1(x, p, work, size, a, b, c):
    x, p, codes = _open(x, p, work, size)
    poke64(work, types.int64(_with_minimum(x, p, True, codes)))


@njit(inline="always")
def _open_long(x, p, work, size):
    at = work + 8
    return (
        carray(pointer_to_floats(x), (256,)),
        carray(pointer_to_bytes(p), (size,)),
        carray(pointer_to_codes(at + k.CODES_AT), (256,)),
        carray(pointer_to_codes(at + k.TRIAL_AT), (32,)),
        carray(pointer_to_floats(at + k.SCALES_AT), (16,)),
        carray(pointer_to_floats(at + k.MINS_AT), (16,)),
        carray(pointer_to_floats(at + k.WEIGHTS_AT), (32,)),
        carray(pointer_to_ints(at + k.S_AT), (16,)),
        carray(pointer_to_ints(at + k.T_AT), (16,)),
    )


def _q2_k(x, p, work, size, a, b, c):
    x, p, codes, trial, scales, mins, weights, s, t = _open_long(x, p, work, size)
    poke64(work, types.int64(k.q2(x, p, codes, trial, scales, mins, weights, s, t)))


def _q3_k(x, p, work, size, a, b, c):
    x, p, codes, _, scales, _, _, s, t = _open_long(x, p, work, size)
    poke64(work, types.int64(k.q3(x, p, codes, scales, s, t)))


def _q4_k(x, p, work, size, a, b, c):
    x, p, codes, trial, scales, mins, weights, s, t = _open_long(x, p, work, size)
    poke64(work, types.int64(k.q45(x, p, codes, trial, scales, mins, weights, s, t, False)))


def _q5_k(x, p, work, size, a, b, c):
    x, p, codes, trial, scales, mins, weights, s, t = _open_long(x, p, work, size)
    poke64(work, types.int64(k.q45(x, p, codes, trial, scales, mins, weights, s, t, True)))


def _q6_k(x, p, work, size, a, b, c):
    x, p, codes, _, scales, _, _, s, t = _open_long(x, p, work, size)
    poke64(work, types.int64(k.q6(x, p, codes, scales, s, t)))


def _q8_k(x, p, work, size, a, b, c):
    x, p = carray(pointer_to_floats(x), (256,)), carray(pointer_to_bytes(p), (size,))
    poke64(work, types.int64(k.q8k(x, p)))


_ENCODERS = {
    "Q8_0": _q8_0, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_K": _q8_k,
}  # fmt: skip
_alive: list[Any] = []


@cache
def encoder(name: str) -> int:
    """Address of the routine that quantizes a format's blocks."""
    compiled = compile_entry(types.void(*[types.int64] * 7), _ENCODERS[name])
    _alive.append(compiled)
    return int(compiled.address)


@njit
def quantize_blocks(task, chunk, scratch):
    """Blocks of one chunk; a block that cannot be written leaves a flag and zeros."""
    block, per_row = task[blocks.BLOCK], task[blocks.PER_ROW]
    x = carray(pointer_to_floats(scratch + X_AT), (256,))
    step = task[blocks.SOURCE_COLUMN]
    for i in range(chunk * task[blocks.PER_CHUNK], min(task[blocks.COUNT], (chunk + 1) * task[blocks.PER_CHUNK])):
        row, b = i // per_row, i % per_row
        source = task[blocks.SOURCE] + row * task[blocks.SOURCE_ROW] + b * block * step
        finite = True
        for j in range(block):
            x[j] = load_element(source + j * step, task[blocks.SOURCE_ELEMENT])
            finite = finite and _finite(x[j])
        out = task[blocks.OUT] + row * task[blocks.OUT_ROW] + b * task[blocks.BLOCK_BYTES]
        work = scratch + WORK_AT
        if not finite:
            poke64(task[blocks.FLAG], NOT_FINITE)
        else:
            call7(task[blocks.DECODER], scratch + X_AT, out, work, task[blocks.BLOCK_BYTES], 0, 0, 0)
            if peek64(work) == 0:
                poke64(task[blocks.FLAG], OVERFLOW)


def quantize_chunk(task, chunk, scratch):
    """`quantize_blocks` from a bare pointer."""
    quantize_blocks(carray(task, (blocks.WORDS,)), chunk, scratch)


@cache
def address() -> int:
    """Address of the compiled entry, ``void (i64 *task, i64 chunk, i64 scratch)``."""
    return int(_entry().address)


@cache
def _entry():
    return compile_entry(types.void(types.CPointer(types.int64), types.int64, types.int64), quantize_chunk)
