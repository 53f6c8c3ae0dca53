"""Weights into panels of 16 columns, and activations into quantized records: what `dot` reads.

Both follow `isogemm.contract.int32` and `layout`, element by element.
"""

from __future__ import annotations

from numba import carray
from numba.core import types

from ....base.jit import njit
from ..emit.entries import call
from ..emit.pointers import pointer_to_bytes, pointer_to_codes, pointer_to_floats, pointer_to_ints
from ..emit.scalars import as_bits, as_float, float_to_half_bits, half_to_float_bits, load_element, peek32, poke32
from ..emit.vectors import CANONICAL_NAN, FLOAT32
from .blocks import Q2_K, put_half
from .layout import COLUMNS
from .records import codes_of, largest_of

F = types.float32
U = types.uint32
ZERO, ONE = F(0), F(1)

# Words of a task array after the pool's header. Panels: chunk p is columns [16 p, 16 p + 16).
FORMAT, BLOCK, BLOCK_BYTES, SUB, BLOCKS, SOURCE, SOURCE_ROW, N, OUT, STORED_ZERO = range(8, 18)
CHUNK, SPAN, SCALES, MINS, D, OFFSET, NBYTES, BYTE, NIBBLE, PAIR, BIT = range(18, 29)
# Activations: blocks [chunk * PER_CHUNK, ...) of all rows' blocks.
X, X_ROW, X_COLUMN, X_ELEMENT, FACTOR, COUNT, PER_CHUNK, OUT_ROW, RECORD_D, SUMS, TOTAL, RECORD, DECODER = range(29, 42)
WORDS = 42
SCRATCH = 4096


@njit
def _put(task, q, column, out):
    """Codes of one column's block into the planes."""
    zero, low = types.int32(task[STORED_ZERO]), 4 if task[NIBBLE] >= 0 else 2
    for chunk in range(task[BLOCK] // 32):
        first = (chunk >> 1) * task[SPAN] + (chunk & 1) * task[CHUNK] + 4 * column
        for e in range(32):
            g, at = e >> 2, first + (e & 3)
            code = types.int32(q[32 * chunk + e]) + zero
            if task[BYTE] >= 0:
                out[at + task[BYTE] + 64 * g] = types.uint8(code)
            if task[NIBBLE] >= 0:
                out[at + task[NIBBLE] + 64 * (g & 3)] |= types.uint8((code & 15) << (4 * (g >> 2)))
            if task[PAIR] >= 0:
                high = code >> 4 if low == 4 else code
                out[at + task[PAIR] + 64 * (g >> 2)] |= types.uint8((high & 3) << (2 * (g & 3)))
            if task[BIT] >= 0:
                out[at + task[BIT]] |= types.uint8(((code >> low) & 1) << g)


def pack_panel(task, chunk, scratch):
    """One panel, which starts as zeros: an entry."""
    task = carray(task, (WORDS,))
    q = carray(pointer_to_codes(scratch), (256,))
    s, t = carray(pointer_to_ints(scratch + 256), (16,)), carray(pointer_to_ints(scratch + 320), (16,))
    code = task[FORMAT]
    for b in range(task[BLOCKS]):
        out = carray(pointer_to_bytes(task[OUT] + (chunk * task[BLOCKS] + b) * task[NBYTES]), (task[NBYTES],))
        for c in range(min(COLUMNS, task[N] - chunk * COLUMNS)):
            source = task[SOURCE] + (chunk * COLUMNS + c) * task[SOURCE_ROW] + b * task[BLOCK_BYTES]
            call(task[DECODER], source, scratch, scratch + 256, scratch + 320, scratch + 384, task[BLOCK_BYTES])
            _put(task, q, c, out)
            put_half(out, task[D] + 2 * c, as_float(peek32(scratch + 384)))
            if task[OFFSET] < task[NBYTES]:
                put_half(out, task[OFFSET] + 2 * c, as_float(peek32(scratch + 388)))
            if task[BLOCK] > 32:
                per_span = 64 // task[SUB]
                for j in range(task[BLOCK] // task[SUB]):
                    low = t[j] << 4 if code == Q2_K else 0
                    at = j // per_span * task[SPAN] + COLUMNS * (j % per_span) + c
                    out[at + task[SCALES]] = types.uint8((s[j] | low) & 255)
                    if task[MINS] < task[SPAN]:
                        out[at + task[MINS]] = types.uint8(t[j])


@njit(error_model="numpy")
def _scale(largest, block):
    """(d, what values are multiplied by) of a block, from the bits of its largest magnitude."""
    if largest >= U(0x7F800000):
        return as_float(U(CANONICAL_NAN)), ZERO
    if block == 32:
        d = as_float(largest) / F(127)
        r = ONE / d
        half = as_float(half_to_float_bits(float_to_half_bits(as_bits(d))))
        return half, r if as_bits(r) < U(0x7F800000) else ZERO
    r = F(127) / as_float(largest)
    return (ONE / r, r) if as_bits(r) < U(0x7F800000) else (ZERO, ZERO)


@njit
def _record(task, x, record, block, sub, short):
    """One block of adjacent float32 into its record."""
    d, r = _scale(largest_of(block, x), block)
    if r == ZERO:  # not 0 times what may be infinite
        for at in range(0, task[RECORD], 4):
            poke32(record + at, U(0))
        total = types.int32(0)
    else:
        total = codes_of(block, sub, short, x, r, record, record + task[SUMS], task[FACTOR])
    poke32(record + task[RECORD_D], as_bits(d))
    if block == 32:
        poke32(record + task[TOTAL], as_bits(F(total)))


def quantize_rows(task, chunk, scratch):
    """Blocks of activations into records: an entry."""
    task = carray(task, (WORDS,))
    block, sub, step, per_row = task[BLOCK], task[SUB], task[X_COLUMN], task[BLOCKS]
    held = carray(pointer_to_floats(scratch), (256,))
    direct = task[X_ELEMENT] == FLOAT32 and step == 4
    for n in range(chunk * task[PER_CHUNK], min(task[COUNT], (chunk + 1) * task[PER_CHUNK])):
        source = task[X] + (n // per_row) * task[X_ROW] + (n % per_row) * block * step
        record = task[OUT] + (n // per_row) * task[OUT_ROW] + (n % per_row) * task[RECORD]
        if not direct:
            for i in range(block):
                held[i] = load_element(source + i * step, task[X_ELEMENT])
            source = scratch
        if block == 32:
            _record(task, source, record, 32, 32, 0)
        elif sub == 32:
            _record(task, source, record, 256, 32, 1)
        elif task[FACTOR] == 1:
            _record(task, source, record, 256, 16, 1)
        else:
            _record(task, source, record, 256, 16, 0)
