"""Blocks of quantized weights taken apart: codes, integer scales and floats (`isogemm.formats.reference`).

    x[i] = (d * s[i // sub]) * q[i]  +  o * t[i // sub]

Every operation is a float32 instruction that nothing here contracts or reorders.
"""

from __future__ import annotations

from numba import carray
from numba.core import types

from ....base.jit import njit
from ....formats.blocks import FORMATS
from ..emit.entries import address_of, call, of_words
from ..emit.pointers import pointer_to_bytes, pointer_to_codes, pointer_to_ints
from ..emit.scalars import as_bits, as_float, float_to_half_bits, half_to_float_bits, peek32, poke32, round_row
from ..emit.vectors import FLOAT32
from .records import multiply_out

CODE = {name: code for code, name in enumerate(FORMATS)}
"""The loops' number of a format."""

Q2_K = CODE["Q2_K"]
WITH_OFFSET = tuple(CODE[fmt.name] for fmt in FORMATS.values() if fmt.offset)

# Words of a task array, after the pool's header: what to do for blocks [chunk * PER_CHUNK, ...) of all rows' blocks.
FORMAT, BLOCK, BLOCK_BYTES, SUB, COUNT, PER_CHUNK, PER_ROW = range(8, 15)
SOURCE, SOURCE_ROW, SOURCE_COLUMN, SOURCE_ELEMENT, OUT, OUT_ROW, OUT_ELEMENT, FLAG, ROUTINE = range(15, 24)
WORDS = 24
# Scratch of one thread: codes [256] of int8, s [16] and t [16] of int32, a block of float32.
CODES_AT, SCALES_AT, MINS_AT, FLOATS_AT, SCRATCH = 0, 256, 320, 384, 384 + 4 * 256 + 1024

ZERO = types.float32(0)


@njit
def half(p, at):
    """The float16 in bytes at, at + 1."""
    return as_float(half_to_float_bits(types.uint32(p[at]) | (types.uint32(p[at + 1]) << types.uint32(8))))


@njit
def finite(x):
    """Whether x is neither infinite nor NaN."""
    return (as_bits(x) & types.uint32(0x7F800000)) != types.uint32(0x7F800000)


@njit
def put_half(p, at, x):
    """x as float16 into bytes at, at + 1."""
    h = float_to_half_bits(as_bits(x))
    p[at], p[at + 1] = types.uint8(h & 255), types.uint8(h >> types.uint32(8))


# Arithmetic in 32 bits throughout: Numba's own integers are 64 wide, which halves what a vector holds.
I32 = types.int32


@njit
def _nibbles(p, at, q, first, zero):
    """32 codes of 16 bytes: low nibbles, then high ones."""
    for j in range(16):
        byte = I32(p[at + j])
        q[first + j] = types.int8((byte & I32(15)) - I32(zero))
        q[first + 16 + j] = types.int8((byte >> I32(4)) - I32(zero))


@njit
def _fifth_bits(p, at, q, zero):
    """Bit j of four bytes is bit 4 of code j."""
    for i in range(4):
        byte = I32(p[at + i])
        for j in range(8):
            bit = (byte >> I32(j)) & I32(1)
            q[8 * i + j] = types.int8(I32(q[8 * i + j]) + (bit << I32(4)) - I32(zero))


@njit
def _pairs(p, at, q):
    """256 codes of two bits: byte l of each 32, shifted by 0, 2, 4 and 6, is the next 32."""
    for chunk in range(2):
        for g in range(4):
            for j in range(32):
                q[128 * chunk + 32 * g + j] = types.int8((I32(p[at + 32 * chunk + j]) >> I32(2 * g)) & I32(3))


@njit
def _quads(p, at, q):
    """256 codes of four bits: byte l of each 32, low nibbles first."""
    for chunk in range(4):
        for j in range(32):
            byte = I32(p[at + 32 * chunk + j])
            q[64 * chunk + j] = types.int8(byte & I32(15))
            q[64 * chunk + 32 + j] = types.int8(byte >> I32(4))


@njit
def _high_bits(p, at, q, shift, zero):
    """Bit g of byte l is a high bit of code 32 g + l."""
    for g in range(8):
        for j in range(32):
            bit = (I32(p[at + j]) >> I32(g)) & I32(1)
            q[32 * g + j] = types.int8(I32(q[32 * g + j]) + (bit << I32(shift)) - I32(zero))


@njit
def _six_bits(p, q):
    for chunk in range(2):
        for g in range(4):
            for j in range(32):
                low = I32(p[64 * chunk + 32 * (g % 2) + j]) >> I32(4 * (g // 2))
                high = I32(p[128 + 32 * chunk + j]) >> I32(2 * g)
                code = (low & I32(15)) | ((high & I32(3)) << I32(4))
                q[128 * chunk + 32 * g + j] = types.int8(code - I32(32))


@njit
def scales_of_q3(p, s):
    for j in range(16):
        low = (p[96 + j % 8] >> (4 * (j // 8))) & 15
        high = (p[104 + j % 4] >> (2 * (j // 4))) & 3
        s[j] = (types.int32(low) | (types.int32(high) << 4)) - 32


@njit
def scales_of_q4(p, s, t):
    for j in range(4):
        a, b, c = types.int32(p[4 + j]), types.int32(p[8 + j]), types.int32(p[12 + j])
        s[j], t[j] = a & 63, b & 63
        s[4 + j], t[4 + j] = (c & 15) | ((a >> 2) & 48), (c >> 4) | ((b >> 2) & 48)


# One routine to a format, compiled when it is first asked for: void (block, q, s, t, floats, bytes), which leaves d
# and o in `floats`.


@njit
def _open(p, q, s, t, size):
    return (
        carray(pointer_to_bytes(p), (size,)),
        carray(pointer_to_codes(q), (256,)),
        carray(pointer_to_ints(s), (16,)),
        carray(pointer_to_ints(t), (16,)),
    )


@njit
def _close(floats, d, o):
    poke32(floats, as_bits(d))
    poke32(floats + 4, as_bits(o))


def _q8_0(block, q, s, t, floats, size):
    p, q, s, t = _open(block, q, s, t, size)
    s[0] = 1
    for j in range(32):
        q[j] = types.int8(p[2 + j])
    _close(floats, half(p, 0), ZERO)


def _short(at, zero, high, offset):
    """Nibbles from byte `at` on, and fifth bits from `high` on, if that is not 0; o behind d, if `offset`."""

    def short(block, q, s, t, floats, size):
        p, q, s, t = _open(block, q, s, t, size)
        s[0] = t[0] = 1
        _nibbles(p, at, q, 0, 0 if high else zero)
        if high:
            _fifth_bits(p, high, q, zero)
        _close(floats, half(p, 0), half(p, 2) if offset else ZERO)

    return short


def _q2_k(block, q, s, t, floats, size):
    p, q, s, t = _open(block, q, s, t, size)
    _pairs(p, 16, q)
    for j in range(16):
        s[j], t[j] = types.int32(p[j] & 15), types.int32(p[j] >> 4)
    _close(floats, half(p, 80), -half(p, 82))


def _q3_k(block, q, s, t, floats, size):
    p, q, s, t = _open(block, q, s, t, size)
    _pairs(p, 32, q)
    _high_bits(p, 0, q, 2, 4)
    scales_of_q3(p, s)
    _close(floats, half(p, 108), ZERO)


def _long(at, high):
    """Q4_K, and with high bits from byte `high` on Q5_K."""

    def long(block, q, s, t, floats, size):
        p, q, s, t = _open(block, q, s, t, size)
        scales_of_q4(p, s, t)
        _quads(p, at, q)
        if high:
            _high_bits(p, high, q, 4, 0)
        _close(floats, half(p, 0), -half(p, 2))

    return long


def _q6_k(block, q, s, t, floats, size):
    p, q, s, t = _open(block, q, s, t, size)
    _six_bits(p, q)
    for j in range(16):
        s[j] = types.int32(types.int8(p[192 + j]))
    _close(floats, half(p, 208), ZERO)


def _q8_k(block, q, s, t, floats, size):
    p, q, s, t = _open(block, q, s, t, size)
    s[0] = 1
    for j in range(256):
        q[j] = types.int8(p[4 + j])
    _close(floats, as_float(peek32(block)), ZERO)


_DECODERS = {
    "Q8_0": _q8_0, "Q5_0": _short(6, 16, 2, False), "Q5_1": _short(8, 0, 4, True), "Q4_0": _short(2, 8, 0, False),
    "Q4_1": _short(4, 0, 0, True), "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _long(16, 0), "Q5_K": _long(48, 16),
    "Q6_K": _q6_k, "Q8_K": _q8_k,
}  # fmt: skip


def decoder(name: str) -> int:
    """Address of the routine that takes a format's blocks apart; 0 for floats."""
    return address_of(_DECODERS[name], of_words(6)) if name in _DECODERS else 0


@njit
def _multiply(code, block, sub, d, o, q, s, t, x):
    """`multiply_out` by the constants of a format, which its vector code is made for."""
    if block == 32:
        if code in WITH_OFFSET:
            multiply_out(32, 32, 1, d, o, q, s, t, x)
        else:
            multiply_out(32, 32, 0, d, o, q, s, t, x)
    elif sub == 16:
        if code in WITH_OFFSET:
            multiply_out(256, 16, 1, d, o, q, s, t, x)
        else:
            multiply_out(256, 16, 0, d, o, q, s, t, x)
    elif sub == 32:
        multiply_out(256, 32, 1, d, o, q, s, t, x)
    else:
        multiply_out(256, 256, 0, d, o, q, s, t, x)


def dequantize_blocks(task, chunk, scratch):
    """Blocks of one chunk into rows of floats: an entry."""
    task = carray(task, (WORDS,))
    code, block, per_row = task[FORMAT], task[BLOCK], task[PER_ROW]
    q, s, t, floats = scratch + CODES_AT, scratch + SCALES_AT, scratch + MINS_AT, scratch + FLOATS_AT
    element = task[OUT_ELEMENT]
    size = 4 if element == FLOAT32 else 2
    for i in range(chunk * task[PER_CHUNK], min(task[COUNT], (chunk + 1) * task[PER_CHUNK])):
        row, b = i // per_row, i % per_row
        source = task[SOURCE] + row * task[SOURCE_ROW] + b * task[BLOCK_BYTES]
        out = task[OUT] + row * task[OUT_ROW] + b * block * size
        call(task[ROUTINE], source, q, s, t, floats, task[BLOCK_BYTES])
        d, o = as_float(peek32(floats)), as_float(peek32(floats + 4))
        if element == FLOAT32:
            _multiply(code, block, task[SUB], d, o, q, s, t, out)
        else:
            _multiply(code, block, task[SUB], d, o, q, s, t, floats)
            round_row(floats, block, out, size, element)
