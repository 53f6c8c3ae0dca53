"""The kernels along rows, a row of `KERNELS` each: when one serves, how it is cut, and what its trial has to reach.

Neither how many warps share a row nor how many elements a thread reads at once reaches the bits. Of a function's
kernels, the first that serves is the fastest; the last takes rows of any length. Code that reads neighbours goes
before code that reads one by one, whichever kernel is its.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....planner.choose import Option, choose
from ..driver.kernel import Bound, Parameter
from ..driver.machine import admissions
from .code import Code, RowsCase
from .family import RowsKernel

LONGEST = 16384  # elements of a row that a block holds
CLUSTER_BYTES = 226 * 1024  # of a row's eighth
CLUSTERS = 16  # of eight blocks, that an H200 runs at once
MULTIPROCESSORS = 132  # of an H200
SLOTS = MULTIPROCESSORS * 16  # warps that keep it busy
# Threads of a block of `columns.cu` that read, by its columns; such blocks on a multiprocessor; rows that a thread of
# `leaves.cu` adds in the time of one of its tiles (H200: 0.1 us a row, 3.6 a tile).
READERS, BLOCKS, ROWS_OF_A_TILE = {16: 384, 32: 480}, 4, 36


class Held(RowsKernel):
    """Rows that fit into registers."""

    file, function = "held", "rows"
    rows = (135,), (3, 5, 3, 3)

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        chosen = team(case.count, case.n, case.kinds[1] >= 0)
        if chosen is None:
            return None
        w, h, r, teams = chosen
        return {"W": w, "H": h, "EACH": r, "TEAMS": teams, "FULL": case.n == 128 * w * h}

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        grid, block = -(-case.count // (code.teams * code.each)), 32 * code.w * code.teams
        return {"grid": (grid,), "block": (block,), "shared": 4 * 128 * (code.w * code.h + 1) if code.w > 1 else 0}

    def lengths(self, code: Code) -> tuple[int, ...]:
        full, least = 128 * code.w * code.h, 128 * code.w * (code.h - 1)
        if code.full:
            return (full,)
        return (full - 4, least + 4) if code.vec else (full - 1, least + 1)


class Long(RowsKernel):
    """Rows of any length, read once for each pass.

    Where there are more rows than multiprocessors, blocks share one: while some wait for a row the others compute.
    """

    file, function = "long", "rows"
    rows = (33,), (2, 3, 2, 3)

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        blocks = -(-case.count // MULTIPROCESSORS)  # of a multiprocessor
        return {"THREADS": {1: 992, 2: 480}.get(blocks, 256), "U": 4}

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        return {"grid": (case.count,), "block": (code.threads + 32,), "shared": 4 * (2 * 16 * code.threads + 128)}

    def lengths(self, code: Code) -> tuple[int, ...]:
        return (16388, 33028) if code.vec else (130, 33027)


class Cluster(Long):
    """A few long rows, each held by eight blocks."""

    file = "cluster"
    rows = (16,), (2, 2, 2, 2)

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        fits = self._shared(case) <= CLUSTER_BYTES and case.count <= CLUSTERS
        return {"THREADS": 512} if fits and case.n > LONGEST else None

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        return {"grid": (8 * case.count,), "block": (512,), "shared": self._shared(case), "cluster": (8,)}

    def _shared(self, case: RowsCase) -> int:
        """Bytes of a block that holds an eighth of a row, and terms or a second operand beside it."""
        two = case.kinds[1] >= 0 or (case.macros or {}).get("OP") == "LOG_SOFTMAX"
        return 64 * -(-case.n // 128) * (2 if two else 1) + 4 * 128 * 4


class Each(RowsKernel):
    """Operations of elements."""

    file = function = "each"

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        return {"grid": (-(-case.count * self._groups(code, case) // 256),), "block": (256,)}

    def numbers(self, code: Code, case: RowsCase) -> list[Parameter]:
        groups = self._groups(code, case)
        return [("i32", case.n), ("u32", groups), ("u32", case.count * groups)]

    def _groups(self, code: Code, case: RowsCase) -> int:
        return -(-case.n // (8 if code.vec else 1))


class Rope(RowsKernel):
    """Rotations of one tensor or two, `n` their pairs; rows of up to 1024 elements are normed before."""

    file = function = "rope"

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        chosen = case.macros or {}
        if not chosen["NORM"]:
            return {}
        groups = -(-2 * case.n // 128)
        each, teams = (4 if groups == 1 and case.count >= 4 * SLOTS else 1), (4 if case.count > MULTIPROCESSORS else 1)
        return {"H": max(groups, 1), "EACH": each, "TEAMS": teams, "ANGLES": vector and chosen["ANGLES"]}

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        if code.norm:
            grid, block = -(-case.count // (code.each * code.teams)), 32 * code.teams
        else:
            grid, block = -(-case.count * case.n // ((8 if code.vec else 1) * 256)), 256
        return {"grid": (grid if case.n else 0, 2 if case.kinds[1] >= 0 else 1), "block": (block,)}


class ColumnSums(RowsKernel):
    """Sums over rows, column by column, of each leaf of them."""

    file = function = "columns"

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        return {"WIDE": _wide(case)}

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        readers = READERS[code.wide]
        return {
            "grid": (_leaves(case) * -(-case.n // code.wide),),
            "block": (readers // 3 * 4,),
            "shared": 2 * readers * 16 * 4,
        }

    def numbers(self, code: Code, case: RowsCase) -> list[Parameter]:
        return [("i32", case.n), ("i32", int(case.start))]


class LeafSums(ColumnSums):
    """The same of leaves that are short or many: a thread has four columns of one."""

    file = "leaves"

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        leaf, wide = case.columns[3], _wide(case)
        waves = -(-_leaves(case) * -(-case.n // wide) // (BLOCKS * MULTIPROCESSORS))
        tiles = -(-leaf // (16 * READERS[wide] // wide))
        return {} if leaf <= ROWS_OF_A_TILE * tiles * waves and _threads(case) < 2**31 else None

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        return {"grid": (-(-_threads(case) // 128),), "block": (128,)}


def _wide(case: RowsCase) -> int:
    """Columns of a block that reads many rows."""
    return 16 if case.n <= 2048 else 32


def _leaves(case: RowsCase) -> int:
    """Of so many rows each, one at least."""
    return max(1, -(-case.count // case.columns[3]))


def _threads(case: RowsCase) -> int:
    """Of four columns of a leaf."""
    return _leaves(case) * -(-case.n // 4)


class TableSums(ColumnSums):
    """Rows added to those of a table that ids name."""

    file = function = "table"

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        return {}

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        return {"grid": (case.count, -(-case.n // 128)), "block": (128,)}


KERNELS: list[RowsKernel] = [Held(), Cluster(), Long(), Each(), Rope(), LeafSums(), ColumnSums(), TableSums()]


def serve(function: str, case: RowsCase, device: int) -> Bound:
    """The launch of the first kernel of `function` whose bits were right on this device and software.

    Raises
    ------
    ContractError
        None of them has the bits of the definition here.
    DeviceError
        While a graph is captured, of code that has not been tried.
    """
    operation = (case.macros or {}).get("OP", function)
    return choose(_options(function, case), case, admissions(device), what=f"{operation} along rows".lower()).launch


def _options(function: str, case: RowsCase) -> list[Option[RowsCase, Bound]]:
    """Code that reads neighbours before code that does not, whichever kernel's."""
    every: list[Option[RowsCase, Bound]] = []
    for kernel in KERNELS:
        if kernel.function == function:
            every += [Option(kernel, code) for code in kernel.configs(case)]
    return sorted(every, key=lambda option: not option.config.vec)


class Team(NamedTuple):
    """How rows are handed out: warps of a row, groups of 128 elements of a warp, rows of a warp, warps of a block."""

    warps: int
    groups: int
    rows: int
    teams: int


def team(rows: int, n: int, two: bool) -> Team | None:
    """Few rows are cut among many warps, many rows are one warp's each; None where a row is too long to hold."""
    if n > LONGEST:
        return None
    steps, alone, shared = max(1, -(-n // 128)), *((4, 8) if two else (8, 4))
    warps = 1
    while warps < 8 and -(-steps // warps) > (alone if warps == 1 else shared):
        warps *= 2
    while -(-steps // warps) > 8 or (warps < 16 and _idle(rows, steps, 2 * warps)):
        warps *= 2
    groups = -(-steps // warps)
    if warps > 1:
        return Team(warps, groups, 1, 1)
    each = 1
    while each < 4 and 2 * each * groups <= alone and rows >= 4 * SLOTS * each:
        each *= 2
    return Team(1, groups, each, 4 if groups < 4 and rows > SLOTS else 1)


def _idle(rows: int, steps: int, warps: int) -> bool:
    """Whether so many warps a row have something to do and somewhere to run."""
    return warps <= steps and rows * warps <= SLOTS
