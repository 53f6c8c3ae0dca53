"""Runs validated products on the CPU: descriptors in, one call into compiled code, results in place.

Contracts with the ``fma`` arithmetic have kernels. All others are served by their executable definition.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...contract.spec import Contract
from ...planner.schedule import Problem, Schedule, schedule
from ...threads import get_num_threads
from . import fields as f
from .loops import scratch_bytes
from .packed import PackedWeight
from .pool import pool
from .run_chunk import address
from .skinny import few_rows_scratch
from .target import target

Array = NDArray[Any]

_A_MODES = {"block": f.PACK_BLOCK, "all": f.PACK_ALL, "in place": f.A_IN_PLACE}
_B_MODES = {"block": f.PACK, "prepared": f.PREPARED, "in place": f.B_IN_PLACE}
_STRATEGIES = {"gemv": f.GEMV, "stream": f.STREAM}


def element_code(dtype: np.dtype[Any]) -> int:
    """Element code of the kernels for a NumPy dtype."""
    return 0 if dtype.itemsize == 4 else 2 if dtype.kind == "f" and dtype.char == "e" else 1


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def gemm(
    a: Array,
    b: Array | PackedWeight,
    out: Array,
    *,
    contract: Contract,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array | None = None,
    bias: Array | None = None,
    accumulate: bool = False,
) -> None:
    """out = alpha * (a @ b) + beta * c + bias on 2-D views of any strides."""
    gemm_items([(a, b, out, c)], contract=contract, alpha=alpha, beta=beta, bias=bias, accumulate=accumulate)


def gemm_batched(a: Array, b: Array, out: Array, *, c: Array | None = None, contract: Contract, **options: Any) -> None:
    """`gemm` on each item of 3-D operands; strides of 0 share an item."""
    count = out.shape[0]
    if count == 0:
        return
    if contract.arithmetic != "fma" or contract.order.kind != "chain":
        gemm_items([(a[i], b[i], out[i], None if c is None else c[i]) for i in range(count)],
                   contract=contract, **options)  # fmt: skip
        return
    task = _task(a[0], b[0], out[0], None if c is None else c[0], count, **options)
    rows = task.rows
    index = np.arange(count, dtype=np.int64)
    swapped = task.swapped
    rows[1:, f.B if swapped else f.A] += index * a.strides[0]
    rows[1:, f.A if swapped else f.B] += index * b.strides[0]
    rows[1:, f.OUT] += index * out.strides[0]
    if c is not None:
        rows[1:, f.C] += index * c.strides[0]
    _run(task, count)


def gemm_items(
    items: Sequence[tuple[Array, Array | PackedWeight, Array, Array | None]],
    *,
    contract: Contract,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Array | None = None,
    accumulate: bool = False,
) -> None:
    """`gemm` on each (a, b, out, c); sizes may differ."""
    options = {"alpha": alpha, "beta": beta, "bias": bias, "accumulate": accumulate}
    if contract.arithmetic != "fma":
        from .defined import gemm_by_definition

        for a, b, out, c in items:
            gemm_by_definition(a, b, out, contract=contract, c=c, **options)
    elif contract.order.kind != "chain":
        from .orders import gemm_in_leaves

        for a, b, out, c in items:
            gemm_in_leaves(a, b, out, contract=contract, c=c, **options)
    elif len(items) == 1:
        a, b, out, c = items[0]
        _run(_task(a, b, out, c, 1, **options), 1)
    else:
        _run_many([_task(a, b, out, c, len(items), **options) for a, b, out, c in items])


class _Task:
    """A task array with what must stay alive and how it is run."""

    __slots__ = ("chosen", "problem", "rows", "scratch", "swapped")

    def __init__(self, rows: NDArray[np.int64], problem: Problem, chosen: Schedule, scratch: int, swapped: bool):
        self.rows, self.problem, self.chosen, self.scratch, self.swapped = rows, problem, chosen, scratch, swapped


def _pointer(x: Array) -> int:
    return x.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _task(
    a: Array,
    b: Array | PackedWeight,
    out: Array,
    c: Array | None,
    count: int,
    *,
    alpha: float,
    beta: float,
    bias: Array | None,
    accumulate: bool,
) -> _Task:
    prepared = isinstance(b, PackedWeight)
    m, n = out.shape
    k = a.shape[1]
    swapped = not prepared and swap_operands(m, n, out.strides[0], out.strides[1], out.itemsize)
    plain_epilogue = alpha == 1.0 and beta == 0.0 and bias is None
    row = np.zeros(f.FIELDS, np.int64)
    _operand(row, f.A, a)
    if prepared:
        row[f.B], row[f.B_E] = b.address, element_code(b.panels.dtype)
    else:
        _operand(row, f.B, b)
    _operand(row, f.OUT, out)
    start = accumulate
    if c is not None and (beta != 0.0 or accumulate):
        _operand(row, f.C, c)
    if bias is not None:
        row[f.BIAS], row[f.BIAS_CS], row[f.BIAS_E] = _pointer(bias), bias.strides[0], element_code(bias.dtype)
    row[f.ALPHA], row[f.BETA], row[f.START] = _bits(alpha), _bits(beta), int(start)
    row[f.M], row[f.N], row[f.K] = m, n, k
    if swapped:
        _swap(row)
        m, n = n, m
    plain = plain_epilogue and row[f.O_E] == 0 and row[f.O_CS] == 4
    if plain and accumulate and not _same(row):
        # The output is the accumulator: it has to hold C before the walk starts.
        out[...] = c
    row[f.PLAIN] = int(plain)
    problem = Problem(
        m, n, k, bool(row[f.A_E] == 0), _unit(row, f.B_RS), _unit(row, f.B_CS), 4 if row[f.B_E] == 0 else 2,
        prepared, plain,
    )  # fmt: skip
    threads = get_num_threads()
    chosen = schedule(problem, threads if count == 1 else 1, target())
    _apply(row, chosen)
    rows = np.empty((count + 1, f.FIELDS), np.int64)
    rows[1:] = row
    return _Task(rows, problem, chosen, _scratch(problem, chosen), swapped)


def swap_operands(m: int, n: int, row_stride: int, column_stride: int, itemsize: int) -> bool:
    """Compute C^T = B^T A^T instead: for column-major outputs, and to make few columns few rows. Same bits."""
    if column_stride != itemsize and row_stride == itemsize and m > 1:
        return True
    return n < m and n <= 8


def _operand(row: NDArray[np.int64], at: int, x: Array) -> None:
    row[at], row[at + 1], row[at + 2], row[at + 3] = _pointer(x), x.strides[0], x.strides[1], element_code(x.dtype)


def _swap(row: NDArray[np.int64]) -> None:
    row[f.M], row[f.N] = row[f.N], row[f.M]
    a, b = row[f.A : f.A + 4].copy(), row[f.B : f.B + 4].copy()
    row[f.A : f.A + 4], row[f.B : f.B + 4] = b, a
    for at in (f.A, f.B, f.OUT, f.C, f.BIAS):
        row[at + 1], row[at + 2] = row[at + 2], row[at + 1]


def _same(row: NDArray[np.int64]) -> bool:
    return bool(row[f.C] == row[f.OUT] and row[f.C_RS] == row[f.O_RS] and row[f.C_CS] == row[f.O_CS])


def _unit(row: NDArray[np.int64], stride: int) -> bool:
    return bool(row[stride] == (4 if row[f.B_E] == 0 else 2))


def _apply(row: NDArray[np.int64], s: Schedule) -> None:
    row[f.STRATEGY] = _STRATEGIES.get(s.strategy, f.TILED) if s.b_mode != "prepared" else f.TILED
    row[f.A_MODE], row[f.B_MODE] = _A_MODES[s.a_mode], _B_MODES[s.b_mode]
    row[f.MC], row[f.NC], row[f.KC], row[f.MR_PANEL] = max(1, s.mc), max(1, s.nc), max(1, s.kc), s.mr
    row[f.GRID_M], row[f.GRID_N] = s.grid_m, s.grid_n


def _scratch(p: Problem, s: Schedule) -> int:
    m, n = -(-p.m // s.grid_m) + s.mr, -(-p.n // s.grid_n) + target().nr
    if s.strategy in _STRATEGIES and s.b_mode != "prepared":
        return few_rows_scratch(n, p.k)
    return scratch_bytes(m, n, p.k, mc=s.mc, nc=s.nc, kc=s.kc, a_all=s.a_mode == "all", plain=p.plain)


def _run(task: _Task, count: int) -> None:
    rows, s = task.rows, task.chosen
    rows[0, 0] = count
    threads = s.threads
    if count == 1:
        rows[0, 1] = 0
        chunks = s.grid_m * s.grid_n
    else:
        work = max(1, task.problem.m * task.problem.n * task.problem.k)
        threads = get_num_threads() if work * count >= 2 * 48 * 1024 else 1
        per_chunk = max(1, min(count // (4 * threads), 2**22 // work)) if threads > 1 else count
        rows[0, 1] = per_chunk
        chunks = -(-count // per_chunk)
    pool().run(address(), rows, chunks, task.scratch, threads)


def _run_many(tasks: list[_Task]) -> None:
    rows = np.empty((len(tasks) + 1, f.FIELDS), np.int64)
    for i, task in enumerate(tasks):
        rows[1 + i] = task.rows[1]
    rows[0, 0], rows[0, 1] = len(tasks), 1
    work = sum(t.problem.m * t.problem.n * t.problem.k for t in tasks)
    threads = get_num_threads() if work >= 2 * 48 * 1024 else 1
    pool().run(address(), rows, len(tasks), max((t.scratch for t in tasks), default=0), threads)
