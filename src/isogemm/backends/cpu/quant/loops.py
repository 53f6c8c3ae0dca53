"""The loops around a pass: panels of columns, blocks of rows that stay in the cache, passes of 8, 4, 2 and 1 rows."""

from __future__ import annotations

from functools import cache

from numba import carray
from numba.core import types
from numba.extending import intrinsic

from ....base.jit import njit
from ....formats.blocks import FORMATS
from ..emit import descriptor as f
from ..emit.entries import address_of, call, of_words
from ..emit.scalars import epilogue_tile
from ..emit.vectors import FLOAT32, define
from .blocks import CODE
from .dot import Walk
from .floats import FloatWalk
from .layout import COLUMNS, LINE
from .native import NativeWalk

# Words behind the header row and the epilogue's descriptor.
# ROW: bytes from a row of weights to the next where blocks are read in place; 0 for panels.
# LANES: chunks are claimed in turn from so many stretches of the panels.
# ROUTINE, plus a number of rows: a pass of so many; of none, a panel's dequantized weights.
RECORDS, RECORD_ROW, ROWS_PER_BLOCK, PANELS, PANEL_BYTES, BLOCKS, COUNT, PER_CHUNK, ROW, LANES, ROUTINE = range(11)
PASSES = (8, 4, 2, 1)  # rows; each pass reads a panel anew from the cache
WAYS = ("panels", "blocks", "floats")
WORDS = 3 * f.FIELDS
SCRATCH = 64 * 16


@njit
def _own_chunk(chunk, w):
    """Which chunk of panels the chunk of that number is.

    Threads that keep step take turns, so each walks a stretch of its own, whose next lines its core has asked for.
    """
    lanes = w[LANES]
    if lanes < 2:
        return chunk
    count = (w[COUNT] + w[PER_CHUNK] - 1) // w[PER_CHUNK]
    lane = chunk % lanes
    return lane * (count // lanes) + min(lane, count % lanes) + chunk // lanes


def run_panels(task, chunk, scratch):
    """Panels of one chunk, all rows: an entry."""
    task = carray(task, (WORDS,))
    d, w = task[f.FIELDS : 2 * f.FIELDS], task[2 * f.FIELDS :]
    m, n = d[f.M], d[f.N]
    chunk = _own_chunk(chunk, w)
    first, last = chunk * w[PER_CHUNK], min(w[COUNT], (chunk + 1) * w[PER_CHUNK])
    direct = d[f.O_E] == FLOAT32 and d[f.O_CS] == 4 and d[f.ALPHA] == f.ONE and d[f.BETA] == 0 and d[f.BIAS] == 0
    for i0 in range(0, m, w[ROWS_PER_BLOCK]):
        stop = min(m, i0 + w[ROWS_PER_BLOCK])
        for p in range(first, last):
            columns = min(COLUMNS, n - p * COLUMNS)
            # In place, the last 16 rows begin earlier, so that there are 16: those before have been written.
            back = COLUMNS - columns if w[ROW] != 0 else 0
            panel, i = w[PANELS] + p * w[PANEL_BYTES] - back * w[ROW], i0
            while i < stop:
                rows = 8 if stop - i >= 8 else (4 if stop - i >= 4 else (2 if stop - i >= 2 else 1))
                one_pass, x = w[ROUTINE + rows], w[RECORDS] + i * w[RECORD_ROW]
                if direct and rows == 1 and columns == COLUMNS:  # sums are the result
                    out = d[f.OUT] + i * d[f.O_RS] + 4 * COLUMNS * p
                    call(one_pass, out, x, w[RECORD_ROW], panel, w[BLOCKS], w[ROW])
                else:
                    call(one_pass, scratch, x, w[RECORD_ROW], panel, w[BLOCKS], w[ROW])
                    epilogue_tile(d, scratch + 4 * back, 64, i, rows, p * COLUMNS, columns)
                i += rows


def write_values(task, chunk, scratch):
    """Dequantized weights of one chunk's panels, [k][columns] in floats that are RECORD_ROW bytes apart: an entry."""
    w = carray(task, (WORDS,))[2 * f.FIELDS :]
    for p in range(chunk * w[PER_CHUNK], min(w[COUNT], (chunk + 1) * w[PER_CHUNK])):
        panel = w[PANELS] + p * w[PANEL_BYTES]
        call(w[ROUTINE], w[RECORDS] + p * COLUMNS * 4, 0, w[RECORD_ROW], panel, w[BLOCKS], 0)


@intrinsic(prefer_literal=True)
def _pass(typingctx, way, code, rows, element, acc, x, x_rs, weights, blocks, stride):
    """One pass, of which all but addresses, strides and the number of blocks are constants."""
    how, fmt, n = WAYS[way.literal_value], list(FORMATS.values())[code.literal_value], rows.literal_value

    def emit(e, *given):
        if how == "blocks":
            NativeWalk(e, fmt, n, given).run()
        elif how == "floats":
            FloatWalk(e, fmt, element.literal_value, given[:5]).run(n)
        else:
            Walk(e, fmt, n, given[:5]).run()

    def codegen(context, builder, signature, args):
        made = define(builder.module, "isogemm_pass", 6, emit)
        if how == "panels" or (how == "blocks" and n > 1):
            # Vectors that are kept there would straddle lines: up to 25 % slower; one row of blocks has room for all.
            made.attributes.alignstack = LINE
        builder.call(made, args[4:])

    return types.void(way, code, rows, element, *[types.int64] * 6), codegen


@cache
def routine(way: str, name: str, rows: int, element: int = FLOAT32) -> int:
    """Address of the pass of `rows` rows over a format's panels or its own blocks, which `ROW` keeps apart.

    Of "floats", activations are floats and weights are rounded to a type of elements.
    """
    how, code = WAYS.index(way), CODE[name]

    def one_pass(acc, x, x_rs, weights, blocks, stride):
        _pass(how, code, rows, element, acc, x, x_rs, weights, blocks, stride)

    return address_of(one_pass, of_words(6), emitted=True)


def put_routines(words, m: int, way: str, name: str, element: int = FLOAT32) -> None:
    """Into a task's words, the passes that `m` rows take: the others are not compiled."""
    for rows in PASSES:
        if m & rows if rows < PASSES[0] else m >= rows:
            words[ROUTINE + rows] = routine(way, name, rows, element)
