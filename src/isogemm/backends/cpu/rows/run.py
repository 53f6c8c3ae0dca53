"""Operations along the last axis of NumPy arrays: rows cut into chunks that threads take, never a row itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ....base.dtypes import CODE_OF
from ....errors import LimitError
from ..gemm.tasks import float32_bits
from ..pool import run_task
from . import loops

Array = npt.NDArray[Any]

# Elements of a chunk: some tens of microseconds, many times what it costs to claim one.
_CHUNK = 2**15
_CHUNKS = 2**16


def run(
    operation: str, x: Array, out: Array, first: Array | None = None, second: Array | None = None, epsilon: float = 0.0
) -> None:
    """``out[i] = operation(x[i], first[i], second[i])`` for every row i, with the bits of `isogemm.contract.rows`.

    Parameters
    ----------
    operation : str
        One of `loops.KERNELS`.
    x : ndarray, shape (..., n)
        float32, bfloat16 or float16, any strides.
    out : ndarray, shape (..., n), or (..., 1) for sums, (..., 3) for cross_entropy
        C-contiguous, not overlapping an operand.
    first, second : ndarray
        The leading dimensions of `x`, broadcast with stride 0 or not; or one row that all share, shape (n,). Of
        cross_entropy, one of each row, of its gradient four.
    epsilon : float

    Raises
    ------
    LimitError
        A row is longer than 2**31 - 1 elements.
    """
    n, rows = x.shape[-1], math.prod(x.shape[:-1])
    if n >= 2**31:
        raise LimitError("elements of a row", limit="fewer than 2**31", value=n, nearest=2**31 - 1)
    if rows == 0 or out.size == 0:
        return
    per_chunk, chunks = cut(rows, n)
    entry, kernel = loops.addresses(operation)
    tables: list[Array] = []  # addresses that the kernel reads until the end of the call
    task = task_of(kernel, rows, per_chunk, out, x, first, second, epsilon=epsilon, tables=tables)
    run_task(entry, task, chunks, loops.scratch_bytes(n))


def task_of(
    kernel: int, rows: int, per_chunk: int, out: Array, x: Array, first: Array | None = None,
    second: Array | None = None, *, epsilon: float, tables: list[Array],
) -> Array:  # fmt: skip
    """The words of a call of so many rows, as `loops` reads them behind the pool's header.

    `tables` keeps what they point to beside the arrays.
    """
    return np.array(
        (
            *(0,) * 8,
            *(kernel, rows, x.shape[-1], per_chunk, float32_bits(epsilon)),
            *(out.ctypes.data, out.shape[-1], CODE_OF[out.dtype]),
            *_describe(x, tables),
            *_describe(first, tables),
            *_describe(second, tables),
            (x if first is None else first).shape[-1],
        ),
        np.int64,
    )


def cut(rows: int, n: int) -> tuple[int, int]:
    """(rows of a chunk, chunks)."""
    wanted = min(rows, _CHUNKS, -(-rows * max(n, 1) // _CHUNK))
    per_chunk = -(-rows // wanted)
    return per_chunk, -(-rows // per_chunk)


def _describe(x: Array | None, tables: list[Array]) -> tuple[int, int, int, int, int]:
    """An operand's words, zeros where there is none.

    Rows that no one step reaches get a table of addresses, which is kept in `tables`.
    """
    if x is None:
        return 0, 0, 0, 0, 0
    place, code, column = x.ctypes.data, CODE_OF[x.dtype], x.strides[-1]
    if x.ndim <= 2:
        return place, x.strides[0] if x.ndim == 2 and len(x) > 1 else 0, 0, column, code
    if x.flags.c_contiguous:
        return place, x.shape[-1] * x.itemsize, 0, column, code
    table = np.array(place, np.int64)
    for extent, stride in zip(x.shape[:-1], x.strides[:-1], strict=True):
        table = np.add.outer(table, np.arange(extent, dtype=np.int64) * stride)
    tables.append(np.ascontiguousarray(table))
    return tables[-1].ctypes.data, 1, 1, column, code
