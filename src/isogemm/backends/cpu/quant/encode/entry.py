"""A routine to a format, which quantizes a block, and whole matrices, block by block."""

from __future__ import annotations

from numba import carray
from numba.core import types

from .....base.jit import njit
from ...emit.entries import address_of, call, of_words
from ...emit.pointers import pointer_to_bytes, pointer_to_codes, pointer_to_floats, pointer_to_ints
from ...emit.scalars import load_element, peek64, poke64
from .. import blocks
from ..blocks import finite
from . import long, short

# Scratch of one thread: a block of float32, then what the super-blocks need.
X_AT, WORK_AT, SCRATCH = 0, 1024, 4096
NOT_FINITE, OVERFLOW = 1, 2

# void (x, block, scratch, bytes), compiled when first asked for, which leaves in the first word of `scratch`
# whether the block's scales are finite.


@njit
def _open(x, p, work, size):
    return (
        carray(pointer_to_floats(x), (256,)),
        carray(pointer_to_bytes(p), (size,)),
        carray(pointer_to_codes(work + 8), (256,)),
    )


def _q8_0(x, p, work, size):
    x, p, _ = _open(x, p, work, size)
    poke64(work, types.int64(short.q8(x, p)))


def _short(five, minimum):
    def quantize(x, p, work, size):
        x, p, codes = _open(x, p, work, size)
        good = short.with_minimum(x, p, five, codes) if minimum else short.symmetric(x, p, five, codes)
        poke64(work, types.int64(good))

    return quantize


@njit
def _open_long(x, p, work, size):
    at = work + 8
    return (
        carray(pointer_to_floats(x), (256,)),
        carray(pointer_to_bytes(p), (size,)),
        carray(pointer_to_codes(at + long.CODES_AT), (256,)),
        carray(pointer_to_codes(at + long.TRIAL_AT), (32,)),
        carray(pointer_to_floats(at + long.SCALES_AT), (16,)),
        carray(pointer_to_floats(at + long.MINS_AT), (16,)),
        carray(pointer_to_floats(at + long.WEIGHTS_AT), (32,)),
        carray(pointer_to_ints(at + long.S_AT), (16,)),
        carray(pointer_to_ints(at + long.T_AT), (16,)),
    )


def _q2_k(x, p, work, size):
    poke64(work, types.int64(long.q2(*_open_long(x, p, work, size))))


def _q3_k(x, p, work, size):
    poke64(work, types.int64(long.q3(*_open_long(x, p, work, size))))


def _q45_k(five):
    def quantize(x, p, work, size):
        poke64(work, types.int64(long.q45(five, *_open_long(x, p, work, size))))

    return quantize


def _q6_k(x, p, work, size):
    poke64(work, types.int64(long.q6(*_open_long(x, p, work, size))))


def _q8_k(x, p, work, size):
    x, p, _ = _open(x, p, work, size)
    poke64(work, types.int64(long.q8k(x, p)))


_ENCODERS = {
    "Q8_0": _q8_0, "Q5_0": _short(True, False), "Q5_1": _short(True, True), "Q4_0": _short(False, False),
    "Q4_1": _short(False, True), "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q45_k(False), "Q5_K": _q45_k(True),
    "Q6_K": _q6_k, "Q8_K": _q8_k,
}  # fmt: skip


def encoder(name: str) -> int:
    """Address of the routine that quantizes a format's blocks."""
    return address_of(_ENCODERS[name], of_words(4))


def quantize_blocks(task, chunk, scratch):
    """Blocks of one chunk; a block that cannot be written leaves a flag and zeros: an entry."""
    task = carray(task, (blocks.WORDS,))
    block, per_row = task[blocks.BLOCK], task[blocks.PER_ROW]
    x = carray(pointer_to_floats(scratch + X_AT), (256,))
    step = task[blocks.SOURCE_COLUMN]
    for i in range(chunk * task[blocks.PER_CHUNK], min(task[blocks.COUNT], (chunk + 1) * task[blocks.PER_CHUNK])):
        row, b = i // per_row, i % per_row
        source = task[blocks.SOURCE] + row * task[blocks.SOURCE_ROW] + b * block * step
        good = True
        for j in range(block):
            x[j] = load_element(source + j * step, task[blocks.SOURCE_ELEMENT])
            good = good and finite(x[j])
        out = task[blocks.OUT] + row * task[blocks.OUT_ROW] + b * task[blocks.BLOCK_BYTES]
        work = scratch + WORK_AT
        if not good:
            poke64(task[blocks.FLAG], NOT_FINITE)
        else:
            call(task[blocks.ROUTINE], scratch + X_AT, out, work, task[blocks.BLOCK_BYTES])
            if peek64(work) == 0:
                poke64(task[blocks.FLAG], OVERFLOW)
