"""The loops around a pass: panels of columns, blocks of rows that stay in the cache, passes of 8, 4, 2 and 1 rows."""

from __future__ import annotations

from functools import cache

from numba import carray

from ....base.jit import njit
from ..emit import descriptor as f
from ..emit.entries import SEVEN_WORDS, address_of
from ..emit.scalars import epilogue_tile
from ..emit.vectors import FLOAT32
from ..gemm.routines import call7
from .blocks import CODE
from .dot import KINDS, dot_rows, instructions
from .floats import float_rows
from .native import native_rows

# Words behind the header row and the epilogue's descriptor.
# ROW: bytes from a row of weights to the next where blocks are read in place; 0 for panels.
# LANES: chunks are claimed in turn from so many stretches of the panels.
RECORDS, RECORD_ROW, ROWS_PER_BLOCK, PANELS, PANEL_BYTES, BLOCKS, COUNT, PER_CHUNK, ROUTINE, ROW, LANES = range(11)
WORDS = 3 * f.FIELDS
SCRATCH = 64 * 16
COLUMNS = 16


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
                x = w[RECORDS] + i * w[RECORD_ROW]
                if direct and rows == 1 and columns == COLUMNS:  # sums are the result
                    out = d[f.OUT] + i * d[f.O_RS] + 4 * COLUMNS * p
                    call7(w[ROUTINE], rows, out, x, w[RECORD_ROW], panel, w[BLOCKS], w[ROW])
                else:
                    call7(w[ROUTINE], rows, scratch, x, w[RECORD_ROW], panel, w[BLOCKS], w[ROW])
                    epilogue_tile(d, scratch + 4 * back, 64, i, rows, p * COLUMNS, columns)
                i += rows


def write_values(task, chunk, scratch):
    """Dequantized weights of one chunk's panels, [k][columns] in floats that are RECORD_ROW bytes apart: an entry."""
    w = carray(task, (WORDS,))[2 * f.FIELDS :]
    for p in range(chunk * w[PER_CHUNK], min(w[COUNT], (chunk + 1) * w[PER_CHUNK])):
        panel = w[PANELS] + p * w[PANEL_BYTES]
        call7(w[ROUTINE], 0, w[RECORDS] + p * COLUMNS * 4, 0, w[RECORD_ROW], panel, w[BLOCKS], 0)


@cache
def routine(name: str) -> int:
    """Address of the passes over panels of a format."""
    code, what = CODE[name], KINDS.index(instructions())

    def passes(rows, acc, x, x_rs, panel, blocks, unused):
        dot_rows(code, what, rows, acc, x, x_rs, panel, blocks)

    return address_of(passes, SEVEN_WORDS)


@cache
def native_routine(name: str) -> int:
    """Address of the passes over rows of blocks, which `ROW` keeps apart."""
    code, what = CODE[name], KINDS.index(instructions())

    def native_passes(rows, acc, x, x_rs, panel, blocks, stride):
        native_rows(code, what, rows, acc, x, x_rs, panel, blocks, stride)

    return address_of(native_passes, SEVEN_WORDS)


@cache
def float_routine(name: str, element: int = FLOAT32) -> int:
    """Address of the passes of float activations, with weights rounded to a type of elements."""
    code = CODE[name]

    def float_passes(rows, acc, x, x_rs, panel, blocks, unused):
        float_rows(code, element, rows, acc, x, x_rs, panel, blocks)

    return address_of(float_passes, SEVEN_WORDS)
