"""Products of at most four rows, for one thread's columns: weights in place, read once."""

from __future__ import annotations

from ...jit import njit
from . import fields as f
from .gemv import MAX_ROWS
from .micro import NR, WIDTH
from .routines import call7, call10
from .scalars import as_bits, epilogue_tile, load_element, peek32, poke32
from .stream import DEPTH
from .vectors import FLOAT32

__all__ = ["few_rows", "few_rows_scratch"]


@njit
def _inputs(d, m0, rows, scratch):  # type: ignore[no-untyped-def]
    """Address and row stride of the rows of A as fp32, contiguous in k: in place where they are so already."""
    if d[f.A_E] == FLOAT32 and d[f.A_CS] == 4:
        return d[f.A] + m0 * d[f.A_RS], d[f.A_RS]
    k = d[f.K]
    size = 4 if d[f.A_E] == FLOAT32 else 2
    whole = k // WIDTH
    for i in range(rows):
        source, target = d[f.A] + (m0 + i) * d[f.A_RS], scratch + i * k * 4
        if d[f.A_CS] == size:
            # A widening copy: the packing of adjacent lines, a vector of k at a time.
            call7(d[f.PACK_A], target, WIDTH * 4, source, size, WIDTH * size, whole, WIDTH)
        for kk in range(whole * WIDTH if d[f.A_CS] == size else 0, k):
            poke32(target + kk * 4, as_bits(load_element(source + kk * d[f.A_CS], d[f.A_E])))
    return scratch, k * 4


@njit
def few_rows(d, m0, m1, n0, n1, scratch):  # type: ignore[no-untyped-def]
    """Rows m0..m1 (at most MAX_ROWS) by columns n0..n1."""
    rows, k = m1 - m0, d[f.K]
    acc = scratch
    x, x_rs = _inputs(d, m0, rows, scratch + MAX_ROWS * (n1 - n0 + 2 * NR) * 4)
    acc_rs = (n1 - n0 + NR) * 4
    if d[f.PLAIN] != 0:
        acc, acc_rs = d[f.OUT] + m0 * d[f.O_RS] + n0 * 4, d[f.O_RS]
    elif d[f.START] != 0:
        for i in range(rows):
            c = d[f.C] + (m0 + i) * d[f.C_RS] + n0 * d[f.C_CS]
            for j in range(n1 - n0):
                poke32(acc + i * acc_rs + j * 4, peek32(c + j * d[f.C_CS]))
    if d[f.STRATEGY] == f.STREAM:
        _stream(d, rows, n0, n1 - n0, x, x_rs, acc, acc_rs)
    else:
        for j in range(0, n1 - n0, WIDTH):
            w = d[f.B] + (n0 + j) * d[f.B_CS]
            call10(d[f.FEW], rows, acc + j * 4, acc_rs, x, x_rs, w, d[f.B_CS], k,
                      min(WIDTH, n1 - n0 - j), d[f.START])  # fmt: skip
    if d[f.PLAIN] == 0:
        epilogue_tile(d, acc, acc_rs, m0, rows, n0, n1 - n0)


@njit
def _stream(d, rows, n0, columns, x, x_rs, acc, acc_rs):  # type: ignore[no-untyped-def]
    k, load_c = d[f.K], d[f.START]
    b = d[f.B] + n0 * d[f.B_CS]
    whole = k // DEPTH * DEPTH
    for kk in range(0, whole, DEPTH):
        call10(d[f.FEW], rows, 1, acc, acc_rs, x + kk * 4, x_rs, b + kk * d[f.B_RS], d[f.B_RS], columns, load_c)
        load_c = 1
    for kk in range(whole, k):
        call10(d[f.FEW], rows, 0, acc, acc_rs, x + kk * 4, x_rs, b + kk * d[f.B_RS], d[f.B_RS], columns, load_c)
        load_c = 1
    if load_c == 0:  # k = 0: the empty sum
        for i in range(rows):
            for j in range(columns):
                poke32(acc + i * acc_rs + j * 4, 0)


def few_rows_scratch(columns: int, k: int) -> int:
    """Scratch bytes of one thread."""
    return 4 * MAX_ROWS * (columns + 2 * NR + k) + 4096
