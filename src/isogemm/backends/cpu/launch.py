"""From arrays to compiled code in one call: addresses are taken inside it, because taking them in Python costs more
than a small product."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...jit import njit
from . import fields as f
from .packed import PackedWeight
from .pool import pool, run_chunks
from .run_chunk import address
from .tasks import Epilogue, Task, add_epilogue

__all__ = ["launch_rows", "launch_single"]

Array = NDArray[Any]


def _start(control, function, template, a, b, out, swapped, chunks, scratch, stride):  # type: ignore[no-untyped-def]
    """Fill in the addresses of a single product and run it."""
    rows = template.copy()
    first, second = (f.B, f.A) if swapped else (f.A, f.B)
    rows[1, first], rows[1, second], rows[1, f.OUT] = a.ctypes.data, b.ctypes.data, out.ctypes.data
    run_chunks(control, function, rows.ctypes.data, chunks, scratch, stride)


@cache
def _starter(a: str, b: str, out: str) -> Any:
    """`_start` for element types "f" (fp32) or "H" (16 bits); any strides, one compilation each."""
    from numba import types

    element = {"f": types.float32, "H": types.uint16}

    def view(char: str, readonly: bool) -> Any:
        return types.Array(element[char], 2, "A", readonly=readonly, aligned=False)

    i64 = types.int64
    signature = types.void(
        i64, i64, types.Array(i64, 2, "C"), view(a, True), view(b, True), view(out, False), i64, i64, i64, i64
    )
    return njit(_start, signature=signature)


def launch_single(task: Task, a: Array, b: Array | PackedWeight, out: Array, epilogue: Epilogue | None) -> None:
    """Run one product."""
    if type(b) is PackedWeight:
        b = b.lines
    rows = task.rows
    if epilogue is not None:
        rows = rows.copy()
        add_epilogue(rows[1], epilogue)
        if task.copies_c and not _is_same(epilogue.c, out):
            out[...] = epilogue.c
    if a.dtype.char != "f":
        a = a.view(np.uint16)
    if b.dtype.char != "f":
        b = b.view(np.uint16)
    if out.dtype.char != "f":
        out = out.view(np.uint16)
    run = _starter(a.dtype.char, b.dtype.char, out.dtype.char)
    function, chunks, swapped = address(), task.chunks, task.swapped

    def start(control: int, scratch: int, stride: int) -> None:
        run(control, function, rows, a, b, out, swapped, chunks, scratch, stride)

    pool().run(start, chunks, task.scratch, task.threads)


def launch_rows(rows: NDArray[np.int64], chunks: int, scratch: int, threads: int) -> None:
    """Run a task array whose descriptors have their addresses."""
    function, tasks = address(), rows.ctypes.data

    def start(control: int, base: int, stride: int) -> None:
        run_chunks(control, function, tasks, chunks, base, stride)

    pool().run(start, chunks, scratch, threads)


def _is_same(c: Array | None, out: Array) -> bool:
    return c is None or c is out or (c.ctypes.data == out.ctypes.data and c.strides == out.strides)
