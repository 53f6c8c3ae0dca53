"""From arrays to compiled code in one call: addresses are taken inside it, because taking them in Python costs more
than a small product."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from ....base.jit import njit
from ..emit import descriptor as f
from ..emit.pointers import pointer_to_words
from ..emit.scalars import peek64
from ..pool import TASK_BYTES, give, pool, run_chunks, run_part, take
from .packed import PackedWeight
from .run_chunk import address
from .tasks import Epilogue, Task, add_epilogue

Array = NDArray[Any]


CHECKED = 2  # a flag beside `swapped`: float32 operands of which nobody has seen whether they are aligned
BUSY, CROOKED = 1, 2  # what `_start` returns where it did nothing
# NumPy's public struct of an array begins with an object's head, then the address of its data (`starter` tries it).
_DATA = object.__basicsize__


def _start(control, threads, scratch, stride, function, template, a, b, out, flags, chunks):
    """Fill in the addresses of a single product and run it, or return BUSY or CROOKED: a kernel for `Pool.run`.

    Arrays come as the addresses of their objects (`id`), which the caller keeps.
    """
    template, a, b, out = peek64(template + _DATA), peek64(a + _DATA), peek64(b + _DATA), peek64(out + _DATA)
    if flags & CHECKED and (a | b) & 3:
        return CROOKED
    if not take(control, threads):
        return BUSY
    # The room before the scratch belongs to this call until its last chunk is done. Nothing here may raise.
    rows = carray(pointer_to_words(scratch - TASK_BYTES), (2, f.FIELDS))
    known = carray(pointer_to_words(template), (2, f.FIELDS))
    for i in range(2):
        for j in range(f.FIELDS):
            rows[i, j] = known[i, j]
    first, second = (f.B, f.A) if flags & 1 else (f.A, f.B)
    rows[1, first], rows[1, second], rows[1, f.OUT] = a, b, out
    # Another thread may write its own address between these two: then weights are asked for, or not, in vain.
    weights = rows[1, f.B]
    rows[1, f.SEEN] = 1 if known[1, f.SEEN] == weights else 0
    if known[1, f.SEEN] != f.NEVER_SEEN:
        known[1, f.SEEN] = weights
    run_part(control, threads, scratch, stride, function, scratch - TASK_BYTES, chunks)
    give(control, threads)
    return 0


@cache
def starter() -> Any:
    """`_start`, compiled.

    It is the compiled function itself: Numba's dispatcher would look at the type of each argument in every call, and
    taking arrays apart in another's way, four of them, takes as long as a small product.

    Raises
    ------
    RuntimeError
        Arrays of this NumPy do not begin as its published struct does.
    """
    from numba import types

    probe = np.empty(1, np.int64)
    if c_void_p.from_address(id(probe) + _DATA).value != probe.ctypes.data:
        raise RuntimeError(f"NumPy {np.__version__} does not keep the address of an array behind its object's head")
    signature = types.int64(*[types.int64] * 11)
    return njit(_start, signature=signature).overloads[signature.args].entry_point


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
    flags, entry = int(task.swapped), address()
    pool().run(starter(), task.scratch, wanted, entry, id(rows), id(a), id(b), id(out), flags, chunks)


def launch_rows(rows: NDArray[np.int64], chunks: int, scratch: int, threads: int) -> None:
    """Run a task array whose descriptors have their addresses."""
    pool().run(run_chunks, scratch, min(threads, chunks), address(), rows.ctypes.data, chunks)


def _is_same(c: Array | None, out: Array) -> bool:
    return c is None or c is out or (c.ctypes.data == out.ctypes.data and c.strides == out.strides)
