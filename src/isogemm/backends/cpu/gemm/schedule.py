"""The schedule of a product on the CPU: what is packed, how the loops are cut, how many threads.

Only this module sees M. Nothing here can reach the bits: every choice evaluates the same contract, and the numeric part
of a plan is fixed before a schedule is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ....errors import LayoutError, OptionError
from ..emit.target import Target
from .facts import BLOCK_DEPTH, FEW_ROWS, SKINNY_DEPTH, SKINNY_ROWS, facts

SMALL = 96**3  # products up to here are walked in place: packing would cost more than it saves
DEEP = 2**28  # elements that a thread may have room for along the whole of K, 1 GiB; beyond, it takes blocks of K
SHARED_BYTES = 16 * 2**20  # of weights that a cache may hold: a thread takes one share of them
CHUNK_BYTES = 512 * 1024  # of other weights, that a thread takes at a time
MC_BYTES = 480 * 1024  # a packed block of A: half of a 1 MiB second-level cache
NC = 4096  # columns of a packed block of B: 8 MiB of fp32 at 512 of K


@dataclass(frozen=True, slots=True)
class Problem:
    """What a CPU schedule depends on; strides only as far as they choose a walk."""

    # m, n, k: extents, after operands were swapped if that suits the output
    m: int
    n: int
    k: int
    # a_place, b_lines, b_rows: A is fp32 (any strides); B's columns are contiguous in k; B's rows are contiguous in n
    a_place: bool
    b_lines: bool
    b_rows: bool
    b_bytes: int  # bytes of an element of B
    prepared: bool  # B is a prepared weight
    plain: bool  # fp32 output with unit column stride and no epilogue


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one product is computed; see `isogemm.backends.cpu.emit.descriptor` for the modes."""

    strategy: Literal["gemv", "stream", "small", "skinny", "tiled"]
    a_mode: Literal["block", "all", "in place"]
    b_mode: Literal["block", "prepared", "in place"]
    mr: int
    mc: int
    nc: int
    kc: int
    grid_m: int
    grid_n: int
    threads: int


def schedule(p: Problem, threads: int, cpu: Target) -> Schedule:
    """The schedule for problem `p` on at most `threads` threads, by this machine's `facts`."""
    if p.m * p.n * p.k < facts().serial:
        threads = 1
    return next(branch.make(p, threads, cpu) for branch in TREE if branch.holds(p, cpu))


def check_legal(p: Problem, s: Schedule, cpu: Target) -> None:
    """Refuse a schedule that the kernels cannot run on this problem: one from elsewhere, for other operands or targets.

    Raises
    ------
    LayoutError
        The schedule walks an operand in a way that its strides or its type do not allow.
    OptionError
        The schedule does not fit the register tile or its own blocks.
    """
    if p.m * p.n * p.k == 0:
        return  # nothing is walked
    few = s.strategy in ("gemv", "stream") and s.b_mode == "in place"
    lines, rows = p.b_lines or p.k == 1, p.b_rows or p.n == 1
    walks = {
        "B prepared": (s.b_mode == "prepared") == p.prepared,
        "B's columns contiguous in k": not few or s.strategy != "gemv" or lines,
        "B's rows contiguous in n": not few or s.strategy != "stream" or rows,
        "B in place: float32 with rows contiguous in n": few or s.b_mode != "in place" or (rows and p.b_bytes == 4),
        "A in place: float32": few or s.a_mode != "in place" or p.a_place,
    }
    for limit, holds in walks.items():
        if not holds:
            raise LayoutError("schedule", limit=limit, value=s, nearest="plan these operands anew")
    direct = s.a_mode == "in place" or (s.b_mode == "prepared" and p.b_bytes != 4)
    tile = cpu.mr_direct if direct else cpu.mr
    fits = {
        f"at most {tile} rows in a tile of {cpu.isa}": few or min(p.m, s.mr) <= tile,
        "grids and threads of at least 1": min(s.mr, s.grid_m, s.grid_n, s.threads) >= 1,
        "blocks of at least 1": s.mc >= min(1, p.m) and s.nc >= min(1, p.n) and s.kc >= min(1, p.k),
        f"NC a multiple of the prepared panels' {cpu.nr}, or all columns": s.b_mode != "prepared"
        or s.nc % cpu.nr == 0
        or s.nc >= p.n,
        "MC of all rows where A is packed at once": s.a_mode != "all" or s.mc >= p.m,
    }
    for limit, holds in fits.items():
        if not holds:
            raise OptionError("schedule", limit=limit, value=s, nearest="plan for this target anew")


def _gemv(p: Problem, cpu: Target) -> bool:
    return p.b_lines and p.m <= facts().gemv_rows and not p.prepared and p.m * p.k <= DEEP


def _stream(p: Problem, cpu: Target) -> bool:
    few = p.m <= FEW_ROWS or (p.m <= facts().stream_rows and p.m * p.n * p.k > SMALL)
    return p.b_rows and few and not p.prepared and p.m * p.k <= DEEP


def _few_rows(p: Problem, threads: int, cpu: Target) -> Schedule:
    gemv = _gemv(p, cpu)
    grid = _fine(p, threads, cpu) if gemv else min(-(-p.n // cpu.nr), threads)
    return Schedule("gemv" if gemv else "stream", "in place", "in place", cpu.mr, p.m, p.n, p.k, 1, grid, threads)


def _fine(p: Problem, threads: int, cpu: Target) -> int:
    """A share of the columns for each thread; of weights that come from memory many small, equal chunks.

    Threads then read neighbouring weights: halves of 4096 x 11008 took 1.28 times as long, of 32000 x 2048 1.41. Chunks
    of smaller weights begin more walks than shares, and their number seldom suits the threads': 1.07 times as long in
    caches, 1.04 from memory (one row of float32, two threads, Zen 4, by hand).
    """
    panels = -(-p.n // cpu.nr)
    if threads == 1 or p.n * p.k * p.b_bytes <= SHARED_BYTES:
        return max(1, min(panels, threads))
    each = max(1, CHUNK_BYTES // (cpu.nr * max(1, p.k) * p.b_bytes))
    return max(1, min(panels, max(2 * threads, -(-panels // each))))


def _split(p: Problem, threads: int, cpu: Target, chunks: int, *, tall: int = 4) -> tuple[int, int]:
    """Grid over rows and columns: rows, where they are more than `tall` times as many, or columns are few.

    Each thread packs what all of its blocks share, rows of A or columns of B.
    """
    panels_m, panels_n = -(-p.m // cpu.mr), -(-p.n // cpu.nr)
    if threads == 1:
        return 1, 1
    if panels_n >= 2 * threads and p.n >= p.m // tall:
        return 1, min(panels_n, chunks * threads)
    return min(panels_m, threads), 1


def _small(p: Problem, threads: int, cpu: Target) -> Schedule:
    b_mode: Literal["in place", "block"] = "in place" if p.b_rows and p.b_bytes == 4 else "block"
    grid_m, grid_n = _split(p, threads, cpu, 1)
    return Schedule("small", "in place", b_mode, cpu.mr_direct, p.m, p.n, p.k, grid_m, grid_n, threads)


def _prepared(p: Problem, threads: int, cpu: Target) -> Schedule:
    mr = _panel_rows(p, cpu)
    in_place = p.a_place and p.m <= min(4, mr)
    if p.m > SKINNY_ROWS or max(p.m, cpu.mr, cpu.nr) * p.k > DEEP:
        return _tiled(p, threads, cpu)
    grid_m, grid_n = 1, _fine(p, threads, cpu)
    kc = p.k if p.m <= mr else _depth(p.k, BLOCK_DEPTH)
    return Schedule(
        "gemv" if p.m <= FEW_ROWS else "skinny",
        "in place" if in_place else "all", "prepared", mr, p.m, cpu.nr, kc, grid_m, grid_n, threads,
    )  # fmt: skip


def _skinny(p: Problem, threads: int, cpu: Target) -> Schedule:
    grid_m, grid_n = (1, _fine(p, threads, cpu)) if p.b_lines else _split(p, threads, cpu, 2)
    # Panels of B that are contiguous in k come one at a time; rows of B want wide strips of contiguous memory.
    nc, kc = (cpu.nr, facts().skinny_depth) if p.b_lines else (512, SKINNY_DEPTH)
    return Schedule("skinny", "all", "block", cpu.mr, p.m, nc, _depth(p.k, kc), grid_m, grid_n, threads)


def _tiled(p: Problem, threads: int, cpu: Target) -> Schedule:
    mr = _panel_rows(p, cpu)
    grid_m, grid_n = _split(p, threads, cpu, 1, tall=1)
    kc = _depth(p.k, facts().block_depth)
    mc = max(MC_BYTES // (4 * kc) // mr, 1) * mr
    b_mode: Literal["prepared", "block"] = "prepared" if p.prepared else "block"
    return Schedule("tiled", "block", b_mode, mr, mc, _columns(p, grid_n, cpu), kc, grid_m, grid_n, threads)


def _panel_rows(p: Problem, cpu: Target) -> int:
    """Narrow prepared panels are widened by the tile that also walks A in place; it has fewer rows."""
    return cpu.mr_direct if p.prepared and p.b_bytes != 4 else cpu.mr


def _depth(k: int, about: int) -> int:
    """K in even blocks of some `about`, at most half as much again: sums are loaded and stored anew for each."""
    return max(1, -(-k // max(1, round(k / about))))


def _columns(p: Problem, grid_n: int, cpu: Target) -> int:
    """NC: each block of columns packs A anew, so as few blocks as the last-level cache allows, and equal ones."""
    columns = max(1, -(-p.n // grid_n))
    return -(-columns // -(-columns // NC) // cpu.nr) * cpu.nr


@dataclass(frozen=True, slots=True)
class ScheduleBranch:
    """One question of the tree, and who computes where its answer is yes."""

    question: str  # with this machine's `facts` in their places
    kernel: str  # A strategy, or several
    holds: Callable[[Problem, Target], bool]
    make: Callable[[Problem, int, Target], Schedule]


TREE = (
    ScheduleBranch("M <= {0.gemv_rows}, B stored [n, k]", "gemv", _gemv, _few_rows),
    ScheduleBranch("M <= {0.stream_words}, B stored [k, n]", "stream", _stream, _few_rows),
    ScheduleBranch("B prepared", "gemv, skinny or tiled, on panels", lambda p, cpu: p.prepared, _prepared),
    ScheduleBranch(
        "M N K <= 96^3, A of float32", "small", lambda p, cpu: p.a_place and p.m * p.n * p.k <= SMALL, _small
    ),
    ScheduleBranch(
        "M <= {0.skinny_words}", "skinny",
        lambda p, cpu: p.m <= (facts().skinny_rows if p.b_lines else SKINNY_ROWS) and max(p.m, cpu.mr) * p.k <= DEEP,
        _skinny,
    ),
    ScheduleBranch("more rows", "tiled", lambda p, cpu: True, _tiled),
)  # fmt: skip
"""The first question that holds decides; no answer changes a bit."""
