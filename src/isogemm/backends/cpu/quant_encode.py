"""Blocks of 32 quantized, with the bits of the ``gguf`` package; and whole matrices, block by block.

    symmetric   d = x[peak] / -2**(bits - 1),      q = trunc(x * (1 / d) + zero + 0.5)
    Q8_0        d = max|x| / 127,                  q = round(x * (1 / d)), halves away from zero
    with a minimum   d = (max - min) / (2**bits - 1),  q = trunc((x - min) * (1 / d) + 0.5)

where peak is the first element of the largest magnitude, and 1 / d is 0 where d is. Codes that are not finite are 0.
"""

from __future__ import annotations

from functools import cache

from numba import carray
from numba.core import types

from ...jit import compile_entry, njit
from . import quant_blocks as blocks
from .quant_blocks import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, pointer_to_bytes, pointer_to_codes
from .quant_encode_k import encode_long
from .row_loops import pointer_to_floats
from .scalars import as_bits, float_to_half_bits, load_element, poke64

__all__ = ["address"]

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


@njit
def encode(code, x, p, scratch):
    """The block of `x` into the bytes `p`; whether its scales are finite."""
    codes = carray(pointer_to_codes(scratch + WORK_AT), (256,))
    if code == Q8_0:
        return _q8(x, p)
    if code in (Q4_0, Q5_0):
        return _symmetric(x, p, code == Q5_0, codes)
    if code in (Q4_1, Q5_1):
        return _with_minimum(x, p, code == Q5_1, codes)
    return encode_long(code, x, p, scratch + WORK_AT)


@njit
def quantize_blocks(task, chunk, scratch):
    """Blocks of one chunk; a block that cannot be written leaves a flag and zeros."""
    block, per_row = task[blocks.BLOCK], task[blocks.PER_ROW]
    x = carray(pointer_to_floats(scratch + X_AT), (256,))
    code, step = task[blocks.FORMAT], task[blocks.SOURCE_COLUMN]
    for i in range(chunk * task[blocks.PER_CHUNK], min(task[blocks.COUNT], (chunk + 1) * task[blocks.PER_CHUNK])):
        row, b = i // per_row, i % per_row
        source = task[blocks.SOURCE] + row * task[blocks.SOURCE_ROW] + b * block * step
        finite = True
        for j in range(block):
            x[j] = load_element(source + j * step, task[blocks.SOURCE_ELEMENT])
            finite = finite and _finite(x[j])
        out = task[blocks.OUT] + row * task[blocks.OUT_ROW] + b * task[blocks.BLOCK_BYTES]
        p = carray(pointer_to_bytes(out), (task[blocks.BLOCK_BYTES],))
        if not finite:
            poke64(task[blocks.FLAG], NOT_FINITE)
        elif not encode(code, x, p, scratch):
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
