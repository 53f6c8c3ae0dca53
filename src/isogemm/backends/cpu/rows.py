"""Operations along the last axis of NumPy arrays: rows cut into chunks that threads take, never a row itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import LimitError
from ...problem import BFLOAT16, FLOAT32
from ...threads import get_num_threads
from . import row_loops as loops
from .pool import pool, run_chunks
from .vectors import BFLOAT16 as BF16_CODE
from .vectors import FLOAT16 as F16_CODE
from .vectors import FLOAT32 as F32_CODE

__all__ = ["OPERATIONS", "run"]

Array = npt.NDArray[Any]

OPERATIONS = {
    "rms_norm": loops.RMS_NORM,
    "layer_norm": loops.LAYER_NORM,
    "softmax": loops.SOFTMAX,
    "log_softmax": loops.LOG_SOFTMAX,
    "sum": loops.SUM,
    "mean": loops.MEAN,
    "silu_mul": loops.SILU_MUL,
    "rope": loops.ROPE,
    "rope_interleaved": loops.ROPE_INTERLEAVED,
}
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
        One of `OPERATIONS`.
    x : ndarray, shape (..., n)
        float32, bfloat16 or float16, any strides.
    out : ndarray, shape (..., n), or (..., 1) for sums
        C-contiguous, not overlapping an operand.
    first, second : ndarray
        The leading dimensions of `x`, broadcast with stride 0 or not; or one row that all share, shape (n,).
    epsilon : float

    Raises
    ------
    LimitError
        A row is longer than 2**31 - 1 elements.
    """
    n, rows = x.shape[-1], int(np.prod(x.shape[:-1], dtype=np.int64))
    if n >= 2**31:
        raise LimitError("elements of a row", limit="fewer than 2**31", value=n, nearest=2**31 - 1)
    if rows == 0 or out.size == 0:
        return
    task = np.zeros(loops.WORDS, np.int64)
    threads, per_chunk, chunks = _cut(rows, n)
    task[loops.OPERATION : loops.X] = (
        OPERATIONS[operation],
        rows,
        n,
        per_chunk,
        int(np.float32(epsilon).view(np.uint32)),
        out.ctypes.data,
        out.shape[-1] * out.itemsize,
        _code(out),
    )
    tables = [
        _describe(task[word : word + 4], operand, rows)
        for word, operand in ((loops.X, x), (loops.FIRST, first), (loops.SECOND, second))
        if operand is not None
    ]
    workers = pool()
    control, threads, base, stride, held = workers.enter(loops.scratch_bytes(n), threads)
    try:
        if run_chunks(control, threads, loops.address(), task.ctypes.data, chunks, base, stride):
            workers.finish(threads, chunks)
    finally:
        workers.leave(held)
        del tables  # addresses that the kernel has read until here


def _cut(rows: int, n: int) -> tuple[int, int, int]:
    """(threads, rows of a chunk, chunks)."""
    wanted = min(rows, _CHUNKS, -(-rows * max(n, 1) // _CHUNK))
    per_chunk = -(-rows // wanted)
    chunks = -(-rows // per_chunk)
    return min(get_num_threads(), chunks), per_chunk, chunks


def _code(x: Array) -> int:
    if x.dtype == FLOAT32:
        return F32_CODE
    return BF16_CODE if x.dtype == BFLOAT16 else F16_CODE


def _describe(words: npt.NDArray[np.int64], x: Array, rows: int) -> npt.NDArray[np.int64]:
    """Write an operand's words; the table of its rows' addresses."""
    if x.ndim == 1:
        table = np.full(rows, x.ctypes.data, np.int64)
    else:
        table = np.array(x.ctypes.data, np.int64)
        for extent, stride in zip(x.shape[:-1], x.strides[:-1], strict=True):
            table = np.add.outer(table, np.arange(extent, dtype=np.int64) * stride)
        table = np.ascontiguousarray(table).reshape(-1)
    words[:] = (table.ctypes.data, x.strides[-1], _code(x), x.ndim > 1)
    return table
