"""The entry that threads run: one chunk of a task array.

A task array is rows of FIELDS integers: a header row (see pool.py), then one descriptor per product, or one for a
whole batch. A chunk is a block of one product's grid, or several whole products.
"""

from __future__ import annotations

from numba import carray, types

from ....base.jit import njit
from ..emit import descriptor as f
from ..emit.pointers import pointer_to_words
from ..emit.scalars import peek64, poke64
from ..pool import JOB, STEP_A, STEP_B, STEP_C, STEP_OUT, STEPS
from .loops import product_block
from .skinny import few_rows

ITEMS, ITEMS_PER_CHUNK = 0, 1
# Of scratch: whose rows of A it holds, and a descriptor of this thread's own.
TAG_BYTES = 64 + -(-8 * f.FIELDS // 64) * 64


@njit
def run_block(d, job, item, gi, gj, scratch):
    """Block (gi, gj) of one product's grid; cut at multiples of what is walked at once, which never changes a bit."""
    m, n = d[f.M], d[f.N]
    m_panels, n_panels = -(-m // d[f.MR_PANEL]), -(-n // d[f.NR_PANEL])
    m0 = min(m, m_panels * gi // d[f.GRID_M] * d[f.MR_PANEL])
    m1 = min(m, m_panels * (gi + 1) // d[f.GRID_M] * d[f.MR_PANEL])
    n0 = min(n, n_panels * gj // d[f.GRID_N] * d[f.NR_PANEL])
    n1 = min(n, n_panels * (gj + 1) // d[f.GRID_N] * d[f.NR_PANEL])
    if m0 >= m1 or n0 >= n1:
        return
    # Rows of A that this thread prepared for an earlier block of the same product are still there.
    ready = 1 if peek64(scratch) == job and peek64(scratch + 8) == item and peek64(scratch + 16) == m0 else 0
    if d[f.STRATEGY] == f.TILED:
        product_block(d, m0, m1, n0, n1, scratch + TAG_BYTES, ready)
    else:
        few_rows(d, m0, m1, n0, n1, scratch + TAG_BYTES, ready)
    poke64(scratch, job)
    poke64(scratch + 8, item)
    poke64(scratch + 16, m0)


@njit
def run_tasks(tasks, chunk, scratch):
    """Chunk number `chunk` of a task array."""
    first = types.int64(0)  # as a constant it would be compiled for, beside the blocks of a grid
    items, per_chunk, job = tasks[0, ITEMS], tasks[0, ITEMS_PER_CHUNK], tasks[0, JOB]
    if tasks[0, STEPS] != 0:
        # One descriptor for the whole batch: addresses advance by constant steps.
        d = carray(pointer_to_words(scratch + 64), (f.FIELDS,))
        for j in range(f.FIELDS):  # as slices, the words of a mismatch would take a fifth of the time to compile all
            d[j] = tasks[1, j]
        begin = chunk * per_chunk
        for word, field in ((STEP_A, f.A), (STEP_B, f.B), (STEP_OUT, f.OUT), (STEP_C, f.C)):
            d[field] += begin * tasks[0, word]
        for item in range(begin, min(items, begin + per_chunk)):
            run_block(d, job, item, first, first, scratch)
            for word, field in ((STEP_A, f.A), (STEP_B, f.B), (STEP_OUT, f.OUT), (STEP_C, f.C)):
                d[field] += tasks[0, word]
        return
    if per_chunk > 0:
        for item in range(chunk * per_chunk, min(items, (chunk + 1) * per_chunk)):
            run_block(tasks[1 + item], job, item, first, first, scratch)
        return
    # Products with grids of their own: walk to the one that owns the chunk.
    for item in range(items):
        d = tasks[1 + item]
        blocks = d[f.GRID_M] * d[f.GRID_N]
        if chunk < blocks:
            run_block(d, job, item, chunk % d[f.GRID_M], chunk // d[f.GRID_M], scratch)
            return
        chunk -= blocks


def run_chunk(tasks, chunk, scratch):
    """`run_tasks` from a bare pointer: an entry."""
    header = carray(tasks, (1, f.FIELDS))
    run_tasks(carray(tasks, (header[0, ITEMS] + 1, f.FIELDS)), chunk, scratch)
