"""Tiles, cuts, packing and threads never reach the bits: any legal schedule gives what the definition says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.products import product, values

import isogemm
from isogemm.backends.cpu.emit import descriptor as f
from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.gemm import quads, turn, wide
from isogemm.backends.cpu.gemm.schedule import Problem, Schedule, _depth, check_legal
from isogemm.backends.cpu.gemm.tasks import task_for
from isogemm.errors import LayoutError, OptionError

from .guards import MIXES, check_gemm

CPU = target()
depths = st.integers(0, 40) | st.integers(500, 530)


@st.composite
def legal(draw: st.DrawFn, m: int, n: int, k: int, mix: str, stored: str) -> Schedule:
    """A schedule that the kernels can run: a register tile holds `mr` rows, fewer with A in place or narrow panels."""
    wide_a, wide_b = MIXES[mix][0].itemsize == 4, MIXES[mix][1].itemsize == 4
    families = ["tiled"]
    if stored == "lines" and m:
        families.append("gemv")
    if stored == "rows" and m:
        families.append("stream")
    strategy: Any = draw(st.sampled_from(families))
    threads = draw(st.integers(1, 4))
    grid_m, grid_n = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    if strategy != "tiled":
        return Schedule(strategy, "in place", "in place", CPU.mr, max(1, m), n, k, 1, grid_n, threads)
    a_mode: Any = draw(st.sampled_from(["block", "all", "in place"] if wide_a else ["block", "all"]))
    b_mode: Any = "prepared" if stored == "packed" else "block"
    if stored == "rows" and wide_b:
        b_mode = draw(st.sampled_from(["block", "in place"]))
    direct = a_mode == "in place" or (b_mode == "prepared" and not wide_b)
    mr = draw(st.integers(1, CPU.mr_direct if direct else CPU.mr))
    # Blocks of A are packed from the first row of a block on; "all" packs them once, so one block has to be enough.
    mc = max(1, m) if a_mode == "all" else draw(st.integers(1, max(1, m) + 5))
    nc = CPU.nr * draw(st.integers(1, 4))
    kc = draw(st.integers(1, k + 3) | st.integers(1, 8))
    return Schedule("tiled", a_mode, b_mode, mr, mc, nc, kc, grid_m, grid_n, threads)


@given(st.integers(0, 10**6), st.integers(1, 5000))
def test_blocks_of_k_are_even(k: int, about: int) -> None:
    """None is a small rest, for which all sums would be loaded and stored once more."""
    depth, wanted = _depth(k, about), max(1, round(k / about))
    blocks = -(-k // depth)
    assert blocks <= wanted
    assert depth <= 1.5 * about + 1
    assert k - (blocks - 1) * depth > depth - wanted


@settings(max_examples=250)
@given(st.data())
def test_any_schedule_has_the_bits_of_the_definition(data: st.DataObject) -> None:
    m, n, k = data.draw(st.integers(0, 45), "m"), data.draw(st.integers(0, 110), "n"), data.draw(depths, "k")
    mix, stored = (
        data.draw(st.sampled_from(list(MIXES)), "mix"),
        data.draw(st.sampled_from(["lines", "rows", "packed"])),
    )
    s = data.draw(legal(m, n, k, mix, stored), "schedule")
    da, db, dtype = MIXES[mix]
    seed = data.draw(st.integers(0, 99), "seed")
    a, w = values((m, k), da, seed=seed, special=True), values((n, k), db, seed=seed + 1, special=True)
    b: Any = isogemm.pack(w) if stored == "packed" else w.T if stored == "lines" else np.ascontiguousarray(w.T)
    event(f"{s.strategy}, A {s.a_mode}, B {s.b_mode}")
    options: dict[str, Any] = {}
    if data.draw(st.booleans(), "epilogue"):
        options = {"alpha": 0.5, "bias": values((n,), seed=seed)}
    if data.draw(st.booleans(), "accumulate"):
        options |= {"c": values((m, n), seed=seed), "accumulate": True}
        dtype = np.dtype(np.float32)
    want = product(a, w.T, out_dtype=dtype, **options)
    check_gemm(a, b, dtype, chosen=_as_run(s, m, n, stored), want=want, **options)


def _as_run(s: Schedule, m: int, n: int, stored: str) -> Schedule:
    """As drawn; but with few columns the operands change places, and the walks drawn were for the others."""
    if stored == "packed" or not (n < m and n <= 8):
        return s
    return replace(s, strategy="tiled", a_mode="block", b_mode="block")


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 1100), st.integers(1, 5), st.sampled_from(list(MIXES)))
def test_the_planner_s_own_schedules(m: int, n: int, k: int, threads: int, mix: str) -> None:
    da, db, dtype = MIXES[mix]
    a, w = values((m, k), da, seed=1), values((n, k), db, seed=2)
    want = product(a, w.T, out_dtype=dtype)
    isogemm.set_num_threads(threads)
    for b in (w.T, np.ascontiguousarray(w.T), isogemm.pack(w)):
        check_gemm(a, b, dtype, want=want)


def test_as_many_rows_go_past_strips_as_walks_take() -> None:
    for element in (0, 1):
        most = quads.most_rows(element)
        assert [quads.fits(m, 4 * 997, 4 * 997, element) for m in (0, 1, most, most + 1)] == [False, True, True, False]
    assert quads.most_rows(0) == (turn.WAY.rows if quads.WIDE else quads.MAX_ROWS)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 3000), st.integers(1, 4000), st.integers(2, 5))
def test_few_rows_are_cut_where_strips_end(m: int, n: int, k: int, threads: int) -> None:
    """Columns that a chunk's last strip reaches back over are walked twice: a half more, where chunks had 32."""
    a, w, out = np.empty((m, k), np.float32), np.empty((n, k), np.float32), np.empty((m, n), np.float32)
    row = task_for(a, w.T, out, None, threads).rows[1]
    if row[f.STRATEGY] != f.QUADS:
        assert row[f.NR_PANEL] == CPU.nr
        return
    rows, columns, step = int(row[f.M]), int(row[f.N]), int(row[f.NR_PANEL])
    if quads.WIDE:  # any number of vectors is whole strips, but a share of less than two has another walk
        cuts = [-(-columns // step) * j // row[f.GRID_N] * step for j in range(row[f.GRID_N])] + [columns]
        shares = [end - start for start, end in pairwise(cuts)]
        if columns // row[f.GRID_N] >= 3 * wide.LANES:
            assert min(shares) >= 2 * wide.LANES
            assert max(shares) - min(shares) < 2 * wide.LANES
        else:
            assert step == 2 * wide.LANES
        widths = {wide.LANES}
    else:
        strips = {quads.BLOCKS[rows], quads.FROM_MEMORY if rows == 1 and quads.GOES_ON else quads.BLOCKS[rows]}
        widths = {blocks * quads.WIDTH for blocks in strips}
    ends = {-(-columns // step) * j // row[f.GRID_N] * step for j in range(1, row[f.GRID_N])}
    assert all(end % width == 0 for end in ends for width in widths)


LINES = Problem(100, 64, 64, True, True, False, 4, False, True)
BLOCKS = Schedule("tiled", "block", "block", CPU.mr, 100, 64, 64, 1, 1, 1)
FEW = replace(BLOCKS, strategy="stream", a_mode="in place", b_mode="in place")
ROWS = replace(LINES, b_lines=False, b_rows=True)


@pytest.mark.parametrize(
    ("problem", "schedule", "error"),
    [
        (LINES, FEW, LayoutError),
        (replace(ROWS, b_bytes=2), replace(BLOCKS, b_mode="in place"), LayoutError),
        (
            replace(LINES, a_place=False), replace(BLOCKS, strategy="small", a_mode="in place", mr=CPU.mr_direct),
            LayoutError,
        ),
        (LINES, replace(BLOCKS, b_mode="prepared"), LayoutError),
        (replace(LINES, prepared=True), BLOCKS, LayoutError),
        (LINES, replace(BLOCKS, a_mode="all", mc=99), OptionError),
        (replace(LINES, prepared=True), replace(BLOCKS, b_mode="prepared", nc=CPU.nr + 1), OptionError),
        (LINES, replace(BLOCKS, mr=CPU.mr + 1), OptionError),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_kernel_could_run_is_refused(problem: Problem, schedule: Schedule, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_legal(problem, schedule, CPU)
