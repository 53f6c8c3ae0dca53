"""The loops around the register tile, for one thread's block of the output.

Five loops after BLIS: columns by NC, K by KC, rows by MC, column panels, row panels. K is cut into panels without
leaving the chain, because each panel starts from the accumulators of the one before. What is packed, and how much at
a time, comes from the schedule and never changes a bit.
"""

from __future__ import annotations

from numba import types

from ....base.jit import njit
from ..emit import descriptor as f
from ..emit.entries import call
from ..emit.scalars import epilogue_tile, peek32, peek32_at, poke32, poke32_at
from ..emit.vectors import CACHE_LINE, FLOAT32
from .micro import HALF, MR, NEXT_PANEL, NEXT_ROWS, NR, UNROLL, WIDTH

TILE_BYTES = 4 * MR * NR
PAD = 256  # stores of whole vectors may run past a panel's end


@njit
def pack_columns(d, dst, j0, columns, p0, kb):
    """Panels [ceil(columns / NR)][kb][NR] of B's columns from j0, rows p0.. of K; missing columns are zero."""
    step = NR * 4
    for j in range(0, columns, NR):
        panel = dst + j * kb * 4
        for v in range(0, NR, WIDTH):
            count = min(WIDTH, columns - j - v)
            if count > 0:
                src = d[f.B] + (j0 + j + v) * d[f.B_CS] + p0 * d[f.B_RS]
                call(d[f.PACK_B], panel + v * 4, step, src, d[f.B_CS], d[f.B_RS], kb, count)
            else:
                for kk in range(kb):
                    for lane in range(NR - v):
                        poke32_at(panel + kk * step + v * 4, lane, 0)
                break


@njit
def pack_rows(d, dst, i0, rows, p0, kb):
    """Row panels [panel][kb][its rows] of A's rows from i0; panels are as even as they come, at most MR_PANEL rows."""
    panels = -(-rows // d[f.MR_PANEL])
    base, extra = rows // panels, rows % panels
    for p in range(panels):
        first, count = p * base + min(p, extra), base + (1 if p < extra else 0)
        panel = dst + first * kb * 4
        for v in range(0, count, WIDTH):
            src = d[f.A] + (i0 + first + v) * d[f.A_RS] + p0 * d[f.A_CS]
            call(d[f.PACK_A], panel + v * 4, count * 4, src, d[f.A_RS], d[f.A_CS], kb, min(WIDTH, count - v))


@njit
def _tile(d, routine, rows, kb, a, b, b_rs, c, c_rs, flags):
    """One register tile: A in place, or in a panel of `rows` rows."""
    if d[f.A_MODE] == f.A_IN_PLACE:
        call(routine, rows, kb, a, d[f.A_RS], d[f.A_CS], b, b_rs, c, c_rs, flags)
    else:
        call(routine, rows, kb, a, 4, 4 * rows, b, b_rs, c, c_rs, flags)


@njit
def _is_in_place(d, width):
    """Whether a panel of so many of B's columns is walked where it lies: not where a tile would pass its end."""
    return width == NR or (width == HALF and d[f.HALF] != 0)


@njit
def _copy_in(d, acc, acc_rs, i0, rows, j0, columns):
    """The tile of C that the walk starts from."""
    for i in range(rows):
        c = d[f.C] + (i0 + i) * d[f.C_RS] + j0 * d[f.C_CS]
        for j in range(NR):
            poke32(acc + i * acc_rs + j * 4, peek32(c + j * d[f.C_CS]) if j < columns else 0)


@njit
def _edge_tile(d, routine, rows, kb, a, b, b_rs, c, columns, flags, tile):
    """A narrower tile, through a whole one or half of one: memory beside C is neither read nor written."""
    c_rs = d[f.O_RS]
    if flags & f.CONTINUES:
        for i in range(rows):
            for j in range(columns):
                poke32_at(tile + i * NR * 4, j, peek32_at(c + i * c_rs, j))
            for j in range(columns, NR):
                poke32_at(tile + i * NR * 4, j, 0)
    _tile(d, routine, rows, kb, a, b, b_rs, tile, NR * 4, flags)
    for i in range(rows):
        for j in range(columns):
            poke32_at(c + i * c_rs, j, peek32_at(tile + i * NR * 4, j))


@njit
def _macro(d, i0, rows, j0, columns, p0, kb, a, b, acc, acc_rs, tile):
    """Column panels by row panels over one packed block of A and B."""
    mode, whole_k = d[f.A_MODE], d[f.K] <= d[f.KC]
    last, first_panel = p0 + kb >= d[f.K], p0 == 0
    continues = f.CONTINUES if (not first_panel or d[f.START] != 0) else 0
    asks = 0 if d[f.SEEN] == 1 else d[f.FROM_MEMORY]
    largest = d[f.MR_PANEL]
    panels = -(-rows // largest)
    base, extra = rows // panels, rows % panels
    rows_follow = NEXT_ROWS if d[f.PLAIN] != 0 or not whole_k else 0
    for j in range(0, columns, NR):
        width = min(NR, columns - j)
        routine = d[f.HALF] if width <= HALF and d[f.HALF] != 0 else d[f.TILE]
        if d[f.B_MODE] == f.PACK:
            bp, b_rs = b + j * kb * 4, NR * 4
        elif d[f.B_MODE] == f.PREPARED:
            b_rs = NR * (4 if d[f.B_E] == FLOAT32 else 2)
            bp = d[f.B] + ((j0 + j) // NR * d[f.K] + p0) * b_rs
        elif _is_in_place(d, width):
            bp, b_rs = d[f.B] + p0 * d[f.B_RS] + (j0 + j) * 4, d[f.B_RS]
        else:
            bp, b_rs = b, NR * 4
        # Several row panels ask for B's next panel, each for a part; few ask for their own, the first for all of them.
        part = kb // UNROLL * CACHE_LINE
        several = d[f.B_MODE] != f.B_IN_PLACE and columns > NR and part * panels >= kb * b_rs
        next_panel = (kb if d[f.B_MODE] == f.PACK else d[f.K]) * b_rs
        for p in range(panels):
            first, count = p * base + min(p, extra), base + (1 if p < extra else 0)
            i = i0 + first
            flags = continues | (rows_follow if p + 1 < panels else 0)
            if several:
                if part * p < kb * b_rs and j + NR < columns:
                    flags |= NEXT_PANEL | (next_panel + part * p) // CACHE_LINE * CACHE_LINE
            elif p == 0:
                flags |= asks
            ap = a + first * kb * 4 if mode != f.A_IN_PLACE else d[f.A] + i * d[f.A_RS] + p0 * d[f.A_CS]
            if d[f.PLAIN] != 0:
                c = d[f.OUT] + i * d[f.O_RS] + (j0 + j) * 4
                if _is_in_place(d, width):
                    _tile(d, routine, count, kb, ap, bp, b_rs, c, d[f.O_RS], flags)
                else:
                    _edge_tile(d, routine, count, kb, ap, bp, b_rs, c, width, flags & ~NEXT_ROWS, tile)
            else:
                t, t_rs = (tile, NR * 4) if whole_k else (acc + first * acc_rs + j * 4, acc_rs)
                if first_panel and d[f.START] != 0:
                    _copy_in(d, t, t_rs, i, count, j0 + j, width)
                _tile(d, routine, count, kb, ap, bp, b_rs, t, t_rs, flags)
                if last:
                    epilogue_tile(d, t, t_rs, i, count, j0 + j, width)


@njit
def product_block(d, m0, m1, n0, n1, scratch, a_ready):
    """Rows m0..m1 by columns n0..n1 of one product; `a_ready`: PACK_ALL was done by an earlier block."""
    k, kc, mc, nc = d[f.K], d[f.KC], d[f.MC], d[f.NC]
    rows = m1 - m0
    tile = scratch
    a_buffer = tile + TILE_BYTES
    a_rows = rows if d[f.A_MODE] == f.PACK_ALL else min(rows, mc)
    a_depth = k if d[f.A_MODE] == f.PACK_ALL else min(k, kc)
    if d[f.A_MODE] == f.A_IN_PLACE:
        a_rows = 0
    b_buffer = a_buffer + (a_rows * a_depth * 4 + PAD) // 64 * 64 + 64
    acc_columns = -(-min(nc, n1 - n0) // NR) * NR
    acc = b_buffer + (acc_columns * min(k, kc) * 4 + PAD) // 64 * 64 + 64
    if d[f.A_MODE] == f.PACK_ALL and a_ready == 0:
        for p0 in range(0, k, kc):
            pack_rows(d, a_buffer + p0 * rows * 4, m0, rows, p0, min(kc, k - p0))
    for j0 in range(n0, n1, nc):
        columns = min(nc, n1 - j0)
        p0 = types.int64(0)  # not a constant, for which everything below would be compiled once more
        while True:  # once even for k = 0: an empty sum is +0, and the epilogue still applies
            kb = min(kc, k - p0)
            if d[f.B_MODE] == f.PACK:
                pack_columns(d, b_buffer, j0, columns, p0, kb)
            elif d[f.B_MODE] == f.B_IN_PLACE and columns % NR and not _is_in_place(d, columns % NR):
                whole = columns // NR * NR
                pack_columns(d, b_buffer, j0 + whole, columns - whole, p0, kb)
            for i0 in range(m0, m1, mc):
                block = min(mc, m1 - i0)
                a = a_buffer
                if d[f.A_MODE] == f.PACK_BLOCK:
                    pack_rows(d, a, i0, block, p0, kb)
                elif d[f.A_MODE] == f.PACK_ALL:
                    a = a_buffer + p0 * rows * 4
                _macro(d, i0, block, j0, columns, p0, kb, a, b_buffer, acc + (i0 - m0) * acc_columns * 4,
                       acc_columns * 4, tile)  # fmt: skip
            p0 += kc
            if p0 >= k:
                break


def scratch_bytes(m: int, n: int, k: int, *, mc: int, nc: int, kc: int, a_all: bool, plain: bool) -> int:
    """Scratch of one thread for a block of m x n outputs; the layout is `product_block`'s."""
    depth = min(k, kc)
    columns = -(-min(nc, n) // NR) * NR
    a = m * k if a_all else min(m, mc) * depth
    acc = 0 if plain or k <= kc else m * columns
    return TILE_BYTES + 4 * (a + columns * depth + acc) + 4 * PAD + 8192
