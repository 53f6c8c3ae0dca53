"""Attention between its products, as `isogemm.contract.attention`: maxima and powers of leaves, and leaves meeting.

Both kernels take whole rows, a row being one query of one head, and loops run over keys or over columns of the result.
Additions and products are plain float32 instructions, which nothing here allows the compiler to contract or to reorder.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.core import types

from ....base.jit import njit
from ....contract import attention as define
from ....contract.arithmetic import fma
from ..emit.pointers import pointer_to_floats
from ..emit.scalars import as_bits, as_float, divide, load_element, peek8, peek32, poke32, round_row
from ..emit.vectors import BFLOAT16, FLOAT16, FLOAT32
from ..rows.loops import largest_in

# Words of both task arrays; the first eight are the pool's header. LEAF_M and LEAF_L are [heads, leaves, rows]; a head
# is one of k and v, and its rows are those of all its queries' heads, TOKENS for each.
HEADS_ROWS, PER_CHUNK, ROWS, TOKENS, FIRST_TOKEN, LEAVES, LEAF_M, LEAF_L = range(8, 16)
# Leaves: products in, [heads, rows, KEYS], and powers out, [heads, leaves, rows, LEAF] of an element code. FACTOR holds
# bits; VISIBLE is the number of keys that token 0 sees, KEYS more than enough where nothing is causal.
PRODUCTS, KEYS, POWERS, POWERS_ELEMENT, FACTOR, VISIBLE, TAKES_SUM, HEADS = range(16, 24)
# The mask: 0 for none, its element code or BOOLEAN, and steps in bytes of batch entry, query head, token and key.
MASK, MASK_ELEMENT, MASK_ENTRY, MASK_HEAD, MASK_TOKEN, MASK_KEY = range(24, 30)
# Meeting: leaves' results, [heads, leaves, rows, COLUMNS], and y, m and l, [entries, query heads, ALL_TOKENS].
PARTS, COLUMNS, OUT, OUT_ELEMENT, OUT_M, OUT_L, ALL_TOKENS = range(16, 23)
FIRST_HEAD = 30  # of both: the call's head that is the block's first
WORDS = 31
BOOLEAN = 9
LANES = 64  # maxima at a time

LEAF = define.LEAF
LOG2E, LEAST, SHIFT = define.LOG2E, define.EXP2_LEAST, define.EXP2_SHIFT
B3, B2, B1, B0 = define.EXP2_TERMS["bfloat16"]
H4, H3, H2, H1, H0 = define.EXP2_TERMS["float16"]
F6, F5, F4, F3, F2, F1, F0 = define.EXP2_TERMS["float32"]
ZERO, ONE, MINUS_ZERO, INFINITY = (types.float32(x) for x in (0.0, 1.0, -0.0, float("inf")))

_largest = largest_in(LANES)


@njit
def _power(x, element):
    """exp2 of the definition, for results that are rounded to `element`."""
    x = LEAST if x < LEAST else x  # NaN stays
    k = x + SHIFT
    r = x - (k - SHIFT)
    if element == BFLOAT16:
        y = fma(fma(fma(B3, r, B2), r, B1), r, B0)
    elif element == FLOAT16:
        y = fma(fma(fma(fma(H4, r, H3), r, H2), r, H1), r, H0)
    else:
        y = fma(fma(fma(fma(fma(fma(F6, r, F5), r, F4), r, F3), r, F2), r, F1), r, F0)
    return y * as_float(types.uint32(as_bits(k) << types.uint32(23)))


@njit
def _masked(t, count, address, step, element):
    """Keys of a leaf that the mask hides, or what it adds to them."""
    if element == BOOLEAN:
        for j in range(count):
            t[j] = t[j] if peek8(address + j * step) != 0 else -INFINITY
    else:
        for j in range(count):
            t[j] = t[j] + load_element(address + j * step, element) * LOG2E


@njit
def _powers(t, count, u, element):
    """Powers of one leaf, in place, for results that are rounded to `element`."""
    if element == BFLOAT16:
        for j in range(count):
            t[j] = _power(t[j] - u, BFLOAT16)
    elif element == FLOAT16:
        for j in range(count):
            t[j] = _power(t[j] - u, FLOAT16)
    else:
        for j in range(count):
            t[j] = _power(t[j] - u, FLOAT32)


@njit
def _sum(address, count, element):
    """The chain over the stored powers, times one each."""
    total = ZERO
    if element == FLOAT32:
        for j in range(count):
            total = total + as_float(peek32(address + 4 * j))
    else:
        for j in range(count):
            total = total + load_element(address + 2 * j, element)
    return total


def run_leaves(task, chunk, scratch):
    """Steps 1 and 2 of the definition behind the products, and the sums of step 3 where the arithmetic is fma.

    As `run_meeting` an entry.
    """
    task = carray(task, (WORDS,))
    keys, leaves, rows, element = task[KEYS], task[LEAVES], task[ROWS], task[POWERS_ELEMENT]
    c = as_float(types.uint32(task[FACTOR]))
    size = 4 if element == FLOAT32 else 2
    groups, lanes = rows // task[TOKENS], carray(pointer_to_floats(scratch), (LANES,))
    for i in range(chunk * task[PER_CHUNK], min(task[HEADS_ROWS], (chunk + 1) * task[PER_CHUNK])):
        head, row = i // rows, i % rows
        group, token = row // task[TOKENS], task[FIRST_TOKEN] + row % task[TOKENS]
        place = task[FIRST_HEAD] + head
        entry, query_head = place // task[HEADS], place % task[HEADS] * groups + group
        mask = task[MASK] + entry * task[MASK_ENTRY] + query_head * task[MASK_HEAD] + token * task[MASK_TOKEN]
        seen = min(max(task[VISIBLE] + token, 0), keys)
        for leaf in range(leaves):
            first = leaf * LEAF
            count = min(LEAF, keys - first)
            source = task[PRODUCTS] + 4 * (i * keys + first)
            t = carray(pointer_to_floats(source), (count,))
            at = (head * leaves + leaf) * rows + row
            for j in range(count):
                t[j] = t[j] * c
            if task[MASK] != 0:
                _masked(t, count, mask + first * task[MASK_KEY], task[MASK_KEY], task[MASK_ELEMENT])
            for j in range(max(seen - first, 0), count):
                t[j] = -INFINITY
            m = types.float32(np.ceil(_largest(t, count, lanes)))  # -inf without a number
            _powers(t, count, ZERO if m == -INFINITY else m, element)
            powers = task[POWERS] + at * LEAF * size
            round_row(source, count, powers, size, element)
            poke32(task[LEAF_M] + 4 * at, as_bits(m))
            if task[TAKES_SUM] != 0:
                poke32(task[LEAF_L] + 4 * at, as_bits(_sum(powers, count, element)))


def run_meeting(task, chunk, scratch):
    """Steps 4 and 5 of the definition."""
    task = carray(task, (WORDS,))
    columns, leaves, rows = task[COLUMNS], task[LEAVES], task[ROWS]
    o = carray(pointer_to_floats(scratch), (columns,))
    groups = rows // task[TOKENS]
    element = task[OUT_ELEMENT]
    size = 4 if element == FLOAT32 else 2
    for i in range(chunk * task[PER_CHUNK], min(task[HEADS_ROWS], (chunk + 1) * task[PER_CHUNK])):
        head, row = i // rows, i % rows
        group, token = row // task[TOKENS], task[FIRST_TOKEN] + row % task[TOKENS]
        m, total = -INFINITY, ZERO
        for j in range(columns):
            o[j] = ZERO
        for leaf in range(leaves):  # order-critical: ascending
            at = (head * leaves + leaf) * rows + row
            m_n, part = as_float(peek32(task[LEAF_M] + 4 * at)), task[PARTS] + 4 * at * columns
            largest = m_n if m_n > m else m
            u = ZERO if largest == -INFINITY else largest
            a = _power(m - u, BFLOAT16)  # of a whole number: exact in every degree
            b = MINUS_ZERO if m_n == -INFINITY else _power(m_n - u, BFLOAT16)
            o_n = carray(pointer_to_floats(part), (columns,))
            for j in range(columns):
                o[j] = fma(o_n[j], b, o[j] * a)
            total = fma(as_float(peek32(task[LEAF_L] + 4 * at)), b, total * a)
            m = largest
        inverse = divide(ONE, total)
        for j in range(columns):
            o[j] = fma(o[j], inverse, ZERO) if total != ZERO else ZERO
        at = ((task[FIRST_HEAD] + head) * groups + group) * task[ALL_TOKENS] + token
        round_row(scratch, columns, task[OUT] + at * columns * size, size, element)
        poke32(task[OUT_M] + 4 * at, as_bits(m + ZERO))
        poke32(task[OUT_L] + 4 * at, as_bits(total) if total == total else types.uint32(0x7FFFFFFF))
