"""From arrays to compiled code in one call: addresses are taken inside it, because taking them in Python costs more
than a small product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from ....base.jit import njit
from ..emit import descriptor as f
from ..emit.pointers import pointer_to_words
from ..pool import TASK_BYTES, give, pool, run_chunks, run_part, take
from .packed import PackedWeight
from .run_chunk import address
from .tasks import Epilogue, Task, add_epilogue

Array = NDArray[Any]


def _start(control, threads, scratch, stride, function, template, a, b, out, swapped, chunks):
    """Fill in the addresses of a single product and run it, or return 1: a kernel for `Pool.run`."""
    if not take(control, threads):
        return 1
    # The room before the scratch belongs to this call until its last chunk is done. Nothing here may raise.
    rows = carray(pointer_to_words(scratch - TASK_BYTES), (2, f.FIELDS))
    for i in range(2):
        for j in range(f.FIELDS):
            rows[i, j] = template[i, j]
    first, second = (f.B, f.A) if swapped else (f.A, f.B)
    rows[1, first], rows[1, second], rows[1, f.OUT] = a.ctypes.data, b.ctypes.data, out.ctypes.data
    # Another thread may write its own address between these two: then weights are asked for, or not, in vain.
    weights = rows[1, f.B]
    rows[1, f.SEEN] = 1 if template[1, f.SEEN] == weights else 0
    template[1, f.SEEN] = weights
    run_part(control, threads, scratch, stride, function, scratch - TASK_BYTES, chunks)
    give(control, threads)
    return 0


_starters: dict[tuple[bool, bool, bool], Any] = {}


def starter(a: bool, b: bool, out: bool) -> Any:
    """`_start` for fp32 or 16-bit (narrow) elements; any strides, one compilation each.

    It is the compiled function itself: Numba's dispatcher would look at the type of each argument in every call, which
    takes as long as a small product. Callers see to the types.
    """
    if (a, b, out) in _starters:
        return _starters[a, b, out]
    from numba import types

    def view(narrow: bool, readonly: bool) -> Any:
        return types.Array(types.uint16 if narrow else types.float32, 2, "A", readonly=readonly, aligned=False)

    i64 = types.int64
    signature = i64(
        *(i64, i64, i64, i64, i64),
        *(types.Array(i64, 2, "C"), view(a, True), view(b, True), view(out, False), i64, i64),
    )
    made = njit(_start, signature=signature).overloads[signature.args].entry_point
    _starters[a, b, out] = made
    return made


@dataclass(frozen=True, slots=True)
class Batch:
    """Products that differ by constant steps of their addresses, in bytes."""

    count: int
    per_chunk: int
    step_a: int
    step_b: int
    step_out: int
    step_c: int
    threads: int


def launch_single(
    task: Task, a: Array, b: Array | PackedWeight, out: Array, epilogue: Epilogue | None, batch: Batch | None = None
) -> None:
    """Run one product, or a batch of which these are the first operands."""
    if isinstance(b, PackedWeight):
        b = b.lines
    rows, chunks, wanted = task.rows, task.chunks, task.threads
    if batch is not None:
        rows = rows.copy()
        steps = (batch.step_b, batch.step_a) if task.swapped else (batch.step_a, batch.step_b)
        rows[0, :8] = (batch.count, batch.per_chunk, 0, 1, *steps, batch.step_out, batch.step_c)
        rows[1, f.GRID_M : f.GRID_N + 1] = 1
        rows[1, f.SEEN] = 0  # of one item's weights at most
        chunks = -(-batch.count // batch.per_chunk)
        wanted = min(batch.threads, chunks)
    if epilogue is not None:
        rows = rows.copy()
        add_epilogue(rows[1], epilogue)
        if batch is None and task.copies_c and not _is_same(epilogue.c, out):
            out[...] = epilogue.c
    narrow_a, narrow_b, narrow_out = task.narrow
    if narrow_a:
        a = a.view(np.uint16)
    if narrow_b:
        b = b.view(np.uint16)
    if narrow_out:
        out = out.view(np.uint16)
    run = _starters.get(task.narrow) or starter(*task.narrow)
    pool().run(run, task.scratch, wanted, address(), rows, a, b, out, task.swapped, chunks)


def launch_rows(rows: NDArray[np.int64], chunks: int, scratch: int, threads: int) -> None:
    """Run a task array whose descriptors have their addresses."""
    pool().run(run_chunks, scratch, min(threads, chunks), address(), rows.ctypes.data, chunks)


def _is_same(c: Array | None, out: Array) -> bool:
    return c is None or c is out or (c.ctypes.data == out.ctypes.data and c.strides == out.strides)
