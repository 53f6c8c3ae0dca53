"""Products of few rows, for one thread's columns: weights in place or in prepared panels, read once."""

from __future__ import annotations

from numba import types

from ....base.jit import njit
from ..emit import descriptor as f
from ..emit.entries import call
from ..emit.scalars import as_bits, epilogue_tile, load_element, peek32, poke32, poke32_at, round_row
from ..emit.vectors import FLOAT32
from .facts import FEW_ROWS
from .gemv import GROUP
from .micro import NR, WIDTH
from .quads import IN_CACHE
from .stream import ASKS, DEPTH, NEAR_BYTES

LINE = 16  # fp32 in a cache line


@njit
def _inputs(d, m0, rows, scratch, ready):
    """Address and row stride of the rows of A as fp32, contiguous in k.

    In place where they are so already, unless there are so many rows that a power-of-two stride would put them all in
    a few cache sets: copies get a stride of an odd number of lines.
    """
    k = d[f.K]
    if d[f.A_E] == FLOAT32 and d[f.A_CS] == 4 and (rows <= 2 or d[f.A_RS] % 1024 != 0):
        return d[f.A] + m0 * d[f.A_RS], d[f.A_RS]
    size = 4 if d[f.A_E] == FLOAT32 else 2
    stride = ((k // LINE + 1) | 1) * LINE * 4
    whole = k // WIDTH
    for i in range(0 if ready != 0 else rows):
        source, target = d[f.A] + (m0 + i) * d[f.A_RS], scratch + i * stride
        if d[f.A_CS] == size:
            # A widening copy: the packing of adjacent lines, a vector of k at a time.
            call(d[f.PACK_A], target, WIDTH * 4, source, size, WIDTH * size, whole, WIDTH)
        for kk in range(whole * WIDTH if d[f.A_CS] == size else 0, k):
            poke32(target + kk * 4, as_bits(load_element(source + kk * d[f.A_CS], d[f.A_E])))
    return scratch, stride


@njit
def _size(d):
    """Bytes of an element of B."""
    return 4 if d[f.B_E] == FLOAT32 else 2


@njit
def few_rows(d, m0, m1, n0, n1, scratch, ready):
    """Rows m0..m1 (as many as the strategy takes) by columns n0..n1; `ready`: x was copied by an earlier block."""
    rows, columns = m1 - m0, n1 - n0
    # x first: its place must not depend on the block's columns, because later blocks use it again.
    turns = scratch + rows * ((d[f.K] // LINE + 1) | 1) * LINE * 4
    acc, acc_rs = turns + rows * WIDTH * 4, (columns + NR) * 4
    x, x_rs = _inputs(d, m0, rows, scratch, ready)
    if d[f.PLAIN] != 0:
        acc, acc_rs = d[f.OUT] + m0 * d[f.O_RS] + n0 * 4, d[f.O_RS]
    elif d[f.START] != 0:
        for i in range(rows):
            c = d[f.C] + (m0 + i) * d[f.C_RS] + n0 * d[f.C_CS]
            for j in range(columns):
                poke32(acc + i * acc_rs + j * 4, peek32(c + j * d[f.C_CS]))
    if d[f.STRATEGY] == f.STREAM:
        _stream(d, rows, n0, columns, x, x_rs, acc, acc_rs)
    elif d[f.STRATEGY] == f.QUADS:
        w = d[f.B] + n0 * d[f.B_CS]
        start = d[f.START] | (IN_CACHE if d[f.SEEN] == 1 else d[f.FROM_MEMORY])
        call(d[f.FEW], rows, acc, acc_rs, x, x_rs, w, d[f.B_CS], d[f.K], columns, start)
    elif d[f.STRATEGY] == f.PANELS:
        w, start = d[f.B] + n0 * d[f.K] * _size(d), d[f.START]
        if d[f.SEEN] == 1:
            start |= IN_CACHE
        call(d[f.FEW], rows, acc, acc_rs, x, x_rs, w, d[f.K], columns, start, 0)
    else:
        for j in range(0, columns, WIDTH):
            w, count = d[f.B] + (n0 + j) * d[f.B_CS], min(WIDTH, columns - j)
            if rows <= GROUP:
                call(d[f.FEW], rows, acc + j * 4, acc_rs, x, x_rs, w, d[f.B_CS], d[f.K], count, d[f.START])
            else:
                _in_turns(d, rows, acc + j * 4, acc_rs, x, x_rs, w, count, turns)
    if d[f.PLAIN] == 0:
        epilogue_tile(d, acc, acc_rs, m0, rows, n0, columns)


@njit
def _in_turns(d, rows, acc, acc_rs, x, x_rs, w, count, turns):
    """One vector of columns for more rows than have registers; accumulators wait in `turns` [rows][WIDTH]."""
    for i in range(rows):
        for j in range(WIDTH):
            start = d[f.START] != 0 and j < count
            poke32_at(turns + i * WIDTH * 4, j, peek32(acc + i * acc_rs + j * 4) if start else 0)
    call(d[f.FEW], rows % GROUP, rows // GROUP, turns, x, x_rs, w, d[f.B_CS], d[f.K], count, 0)
    for i in range(rows):
        round_row(turns + i * WIDTH * 4, count, acc + i * acc_rs, types.int64(4), types.int64(FLOAT32))


@njit
def _stream(d, rows, n0, columns, x, x_rs, acc, acc_rs):
    """Rows of B pass by, DEPTH at a time and the last ones alone, each past all rows of x."""
    k, start = d[f.K], d[f.START]
    asks = ASKS if d[f.SEEN] != 1 and (rows > 2 or DEPTH * abs(d[f.B_RS]) <= NEAR_BYTES) else 0
    whole, kk = k // DEPTH * DEPTH, types.int64(0)
    while kk < k:
        deep = 1 if kk < whole else 0
        b, flags = d[f.B] + n0 * d[f.B_CS] + kk * d[f.B_RS], start | asks
        for i in range(0, rows, FEW_ROWS):
            to, of, some = acc + i * acc_rs, x + i * x_rs + kk * 4, min(FEW_ROWS, rows - i)
            call(d[f.FEW], some, deep, to, acc_rs, of, x_rs, b, d[f.B_RS], columns, flags)
            flags = start  # what was asked for once is on its way
        start = f.CONTINUES
        kk += DEPTH if deep != 0 else 1
    if start == 0:  # k = 0: the empty sum
        for i in range(rows):
            for j in range(columns):
                poke32(acc + i * acc_rs + j * 4, 0)


def few_rows_scratch(rows: int, columns: int, k: int) -> int:
    """Scratch bytes of one thread: accumulators, those that take turns, and x as fp32."""
    return 4 * rows * (columns + NR + WIDTH + k + 3 * LINE) + 8192
