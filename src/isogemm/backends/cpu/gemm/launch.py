"""From arrays to compiled code in one call: addresses are taken inside it, because taking them in Python costs more
than a small product."""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from ....base.jit import njit
from ..emit import descriptor as f
from ..emit.entries import address_of
from ..emit.pointers import pointer_to_words
from ..emit.scalars import peek32, peek64
from ..pool import TASK_BYTES, give, pool, run_part, run_task, take
from .packed import PackedWeight
from .run_chunk import run_chunk
from .tasks import Epilogue, Task, add_epilogue

Array = NDArray[Any]


BUSY, UNLIKE = 1, 2  # what `_start` returns where it did nothing
# NumPy's public struct of an array: behind an object's head the address of its data, the number of its axes, addresses
# of extents and strides, its base, its type and flags (`starter` tries them).
_DATA = object.__basicsize__
_AXES, _EXTENTS, _STRIDES, _TYPE, _FLAGS = (_DATA + offset for offset in (8, 16, 24, 40, 48))
_WRITEABLE = 0x400


@njit
def _is_like(array, known, at):
    """Whether an array has the extents, strides and type that are `known` (`likeness`), and whole words."""
    axes = known[0, at + f.AXES]
    if peek32(array + _AXES) != axes or peek64(array + _DATA) & 3 or peek64(array + _TYPE) != known[0, at + f.TYPE]:
        return False
    extents, strides = peek64(array + _EXTENTS), peek64(array + _STRIDES)
    for i in range(axes):
        if peek64(extents + 8 * i) != known[0, at + f.EXTENTS + i]:
            return False
        if peek64(strides + 8 * i) != known[0, at + f.STRIDES + i]:
            return False
    return True


@njit
def _are_apart(x, nbytes, out, known):
    """Whether no byte between an operand's first and last element is between those of the output."""
    x, out = peek64(x + _DATA), peek64(out + _DATA)
    return x + nbytes <= out or out + known[0, f.LIKE_OUT + f.SPAN] <= x


@njit
def _is_added(bias, known):
    """Whether an array is a number of A's type for each column of the output, side by side, in whole words."""
    if peek32(bias + _AXES) != 1 or peek64(bias + _DATA) & 3 or peek64(bias + _TYPE) != known[0, f.LIKE_A + f.TYPE]:
        return False
    return peek64(peek64(bias + _EXTENTS)) == _columns(known) and peek64(peek64(bias + _STRIDES)) == 4


@njit
def _columns(known):
    return known[0, f.LIKE_OUT + f.EXTENTS + known[0, f.LIKE_OUT + f.AXES] - 1]


def likeness(array: Array) -> tuple[int, ...]:
    """What `_is_like` compares of a matrix or a stack of them, and how many bytes it lies in.

    That is less than there are, or negative, where a stride is.
    """
    none = (0,) * (f.STRIDES - f.EXTENTS - array.ndim)
    span = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
    return array.ndim, *array.shape, *none, *array.strides, *none, id(array.dtype), span


def _start(control, threads, scratch, stride, template, a, b, out, bias):
    """Fill in the addresses of a product or a batch and run it, or return BUSY or UNLIKE: a kernel for `Pool.run`.

    Arrays come as the addresses of their objects (`id`), which the caller keeps; 0 for a bias that is none, or that
    the template has.
    """
    known = carray(pointer_to_words(peek64(template + _DATA)), (2, f.FIELDS))
    flags = known[0, f.FLAGS]
    if flags & f.COMPARED and not (_is_like(a, known, f.LIKE_A) and _is_like(b, known, f.LIKE_B)):
        return UNLIKE
    if bias and not _is_added(bias, known):
        return UNLIKE
    if flags & f.INTO and not (
        _is_like(out, known, f.LIKE_OUT)
        and peek32(out + _FLAGS) & _WRITEABLE
        and _are_apart(a, known[0, f.LIKE_A + f.SPAN], out, known)
        and _are_apart(b, known[0, f.LIKE_B + f.SPAN], out, known)
        and (bias == 0 or _are_apart(bias, 4 * _columns(known), out, known))
    ):
        return UNLIKE
    if not take(control, threads):
        return BUSY
    a, b, out = peek64(a + _DATA), peek64(b + _DATA), peek64(out + _DATA)
    # The room before the scratch belongs to this call until its last chunk is done. Nothing here may raise.
    rows = carray(pointer_to_words(scratch - TASK_BYTES), (2, f.FIELDS))
    for i in range(2):
        for j in range(f.FIELDS):
            rows[i, j] = known[i, j]
    first, second = (f.B, f.A) if flags & f.SWAPPED else (f.A, f.B)
    rows[1, first], rows[1, second], rows[1, f.OUT] = a, b, out
    if bias:
        rows[1, f.BIAS] = peek64(bias + _DATA)
    # Another thread may write its own address between these two: then weights are asked for, or not, in vain.
    weights = rows[1, f.B]
    rows[1, f.SEEN] = 1 if known[1, f.SEEN] == weights else 0
    if known[1, f.SEEN] != f.NEVER_SEEN:
        known[1, f.SEEN] = weights
    run_part(control, threads, scratch, stride, known[0, f.FUNCTION], scratch - TASK_BYTES, known[0, f.CHUNKS])
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

    probe = np.empty((3, 5), np.int64)[:2, ::2]
    words = (c_int64 * 7).from_address(id(probe) + _DATA)
    lists = [(c_int64 * 2).from_address(words[i])[:] for i in (2, 3)]
    found = words[0], words[1] & 0xFFFFFFFF, *lists, words[5], words[6] & 0xFFFFFFFF
    if found != (probe.ctypes.data, 2, [2, 3], [40, 16], id(probe.dtype), probe.flags.num):
        raise RuntimeError(f"NumPy {np.__version__} does not keep an array's address, extents and type as published")
    signature = types.int64(*[types.int64] * 9)
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


def batched(task: Task, batch: Batch) -> tuple[NDArray[np.int64], int]:
    """The template of a batch, and the threads that it is for."""
    rows = task.rows.copy()
    steps = (batch.step_b, batch.step_a) if task.swapped else (batch.step_a, batch.step_b)
    rows[0, :8] = (batch.count, batch.per_chunk, 0, 1, *steps, batch.step_out, batch.step_c)
    rows[1, f.GRID_M : f.GRID_N + 1] = 1
    rows[1, f.SEEN] = f.NEVER_SEEN  # of one item's weights at most
    rows[0, f.CHUNKS] = -(-batch.count // batch.per_chunk)
    return rows, min(batch.threads, int(rows[0, f.CHUNKS]))


def launch_single(
    task: Task, a: Array, b: Array | PackedWeight, out: Array, epilogue: Epilogue | None, batch: Batch | None = None
) -> None:
    """Run one product, or a batch of which these are the first operands."""
    if isinstance(b, PackedWeight):
        b = b.lines
    rows, wanted = (task.rows, task.threads) if batch is None else batched(task, batch)
    if epilogue is not None:
        rows = rows.copy()
        add_epilogue(rows[1], epilogue)
        if batch is None and task.copies_c and not _is_same(epilogue.c, out):
            out[...] = epilogue.c
    pool().run(starter(), task.scratch, wanted, id(rows), id(a), id(b), id(out), 0)


def launch_rows(rows: NDArray[np.int64], chunks: int, scratch: int, threads: int) -> None:
    """Run a task array whose descriptors have their addresses."""
    run_task(address_of(run_chunk), rows, chunks, scratch, threads)


def _is_same(c: Array | None, out: Array) -> bool:
    return c is None or c is out or (c.ctypes.data == out.ctypes.data and c.strides == out.strides)
