"""What register tiles ask for ahead: the next rows of C, and the next panel of B, each line once, nothing beyond."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pytest
from tests.products import values

import isogemm
from isogemm.backends.cpu.emit import descriptor as f
from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.emit.vectors import CACHE_LINE
from isogemm.backends.cpu.gemm import facts
from isogemm.backends.cpu.gemm.launch import launch_single
from isogemm.backends.cpu.gemm.micro import NEXT_PANEL, NEXT_ROWS, UNROLL
from isogemm.backends.cpu.gemm.tasks import task_for

TILE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)
NR = target().nr
USUAL = replace(facts.usual(), skinny_rows=0, gemv_rows=0, block_depth=64, tile_ahead=2**13)


class Call(NamedTuple):
    """One tile, as its routine is called."""

    rows: int
    k: int
    b: int
    c: int
    c_rs: int
    flags: int


@contextmanager
def chosen() -> Iterator[None]:
    """Blocks of few of K, whatever was measured here."""
    facts.set_facts(USUAL)
    try:
        yield
    finally:
        facts.set_facts(None)


def tiles(m: int, n: int, k: int, *, packed: bool, epilogue: bool = False) -> list[Call]:
    """The calls of one thread; nothing is multiplied."""
    calls: list[Call] = []

    def note(rows: int, k: int, a: int, a_rs: int, a_cs: int, b: int, b_rs: int, c: int, c_rs: int, flags: int) -> None:
        calls.append(Call(rows, k, b, c, c_rs, flags))

    routine = TILE(note)
    x, w = values((m, k)), values((n, k))
    b = isogemm.pack(w) if packed else w.T
    out = np.empty((m, n), np.float16 if epilogue else np.float32)
    with chosen():
        task = task_for(x, b, out, None, 1)
    rows = task.rows.copy()
    rows[1, f.TILE] = ctypes.cast(routine, ctypes.c_void_p).value
    launch_single(replace(task, rows=rows), x, b, out, None)
    return calls


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("m", [193, 240])
def test_the_next_panel_is_asked_for_once(m: int, packed: bool) -> None:
    """By the tiles of a panel together, before its own begins; and of the last panel nothing behind it."""
    panels = [list(calls) for _, calls in groupby(tiles(m, 3 * NR, 130, packed=packed), key=lambda call: call.b)]
    assert len(panels) == 2 * 3  # blocks of 65 of K
    for block in (panels[:3], panels[3:]):
        for now, then in zip(block, [*block[1:], None], strict=True):
            asked = [
                now[0].b + (call.flags & -CACHE_LINE) + CACHE_LINE * i
                for call in now
                if call.flags & NEXT_PANEL
                for i in range(call.k // UNROLL)
            ]
            assert len(set(asked)) == len(asked)
            if then is None:
                assert not asked
                continue
            size = 4 * NR * then[0].k
            first = asked[0]
            assert then[0].b - CACHE_LINE < first <= then[0].b
            assert asked == list(range(first, first + CACHE_LINE * len(asked), CACHE_LINE))
            whole = CACHE_LINE * (then[0].k // UNROLL) * len(now)
            assert len(asked) * CACHE_LINE >= min(size, whole) - CACHE_LINE


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_c_are_asked_for_where_the_next_tile_has_them(packed: bool, epilogue: bool) -> None:
    calls = tiles(200, 3 * NR, 130, packed=packed, epilogue=epilogue)
    for now, then in zip(calls, [*calls[1:], None], strict=True):
        follows = then is not None and then.b == now.b
        assert bool(now.flags & NEXT_ROWS) == follows
        if then is not None and follows:
            assert then.c == now.c + now.rows * now.c_rs


def test_few_row_panels_ask_for_their_own() -> None:
    """Of weights that may come from memory; the first rows ask, and the others find it."""
    large = tiles(2 * target().mr, 3 * NR, 130, packed=True)
    assert not any(call.flags & NEXT_PANEL for call in large)
    for _, calls in groupby(large, key=lambda call: call.b):
        first, *others = (call.flags & -CACHE_LINE for call in calls)
        assert (first, set(others)) == (2**13, {0})


@pytest.mark.parametrize("epilogue", [False, True])
def test_what_lies_in_a_tile_of_its_own_has_no_rows_below(epilogue: bool) -> None:
    """A narrow tile, or one whose epilogue follows at once, is in one place for all rows."""
    calls = tiles(100, NR - 3, 60, packed=False, epilogue=epilogue)
    assert {call.flags & NEXT_ROWS for call in calls} == {0}
