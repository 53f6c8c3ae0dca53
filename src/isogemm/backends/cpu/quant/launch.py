"""A quantized product of few rows in one compiled call: activations into records, then the panels.

For one row, taking addresses and filling in task arrays from Python costs more than quantizing it. Here both task
arrays come from templates, which are kept by shape, and addresses are taken in compiled code.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray

from ....base.dtypes import CODE_OF
from ....base.jit import njit
from ....formats.blocks import FORMATS
from ..emit import descriptor as f
from ..emit.entries import address_of
from ..emit.pointers import pointer_to_words
from ..pool import ALIGN, give, pool, run_part, take
from . import layout, loops, pack
from .blocks import CODE

Array = npt.NDArray[Any]

SERIAL = 2**19  # multiply-adds below which a second thread costs more than it saves
CHUNK = 2**19  # multiply-adds of a chunk: enough to hide the claim, small enough to balance
IN_PLACE = 8  # panels of a chunk: one that is read in place asks for the next one's lines, for the same core
ROWS_BYTES = 2**18  # activations that a block of rows may keep in the second-level cache
ACTIVATIONS = 2**12  # elements of a chunk of activations
SCRATCH = max(loops.SCRATCH, pack.SCRATCH)
# Of a call's own room, from an aligned address: two task arrays, then records.
TASK_AT = -(-8 * pack.WORDS // ALIGN) * ALIGN
RECORDS_AT = TASK_AT + -(-8 * loops.WORDS // ALIGN) * ALIGN


class PreparedCall(NamedTuple):
    """All of a product that does not depend on addresses.

    Attributes
    ----------
    quantizing, product : int64 array
        Task arrays.
    quantizing_chunks, product_chunks, threads, room : int
        `room` is in bytes.
    narrow : tuple of bool
        Whether x and out have 16-bit elements.
    out_code : int
    """

    quantizing: Array
    product: Array
    quantizing_chunks: int
    product_chunks: int
    threads: int
    room: int
    narrow: tuple[bool, bool]


@lru_cache(maxsize=256)
def layout_words(name: str, k: int) -> Array:
    """Layouts as words of `pack`'s task arrays, for callers to copy and complete."""
    fmt = FORMATS[name]
    p, r, planes = layout.panel(fmt), layout.record(fmt), layout.planes(fmt)
    task = np.zeros(pack.WORDS, np.int64)
    task[pack.FORMAT], task[pack.BLOCK], task[pack.BLOCK_BYTES] = CODE[fmt.name], fmt.block, fmt.nbytes
    task[pack.SUB], task[pack.BLOCKS], task[pack.STORED_ZERO] = fmt.sub, k // fmt.block, layout.stored_zero(fmt)
    task[pack.CHUNK : pack.NBYTES + 1] = p
    for word, plane in ((pack.BYTE, "byte"), (pack.NIBBLE, "nibble"), (pack.PAIR, "pair"), (pack.BIT, "bit")):
        task[word] = planes.get(plane, -1)
    task[pack.RECORD_D : pack.RECORD + 1] = r
    task[pack.FACTOR] = 1 if fmt.offset and fmt.block > 32 else -layout.stored_zero(fmt)
    return task


def quantizing_task(name: str, m: int, k: int, x: np.dtype[Any], per_chunk: int) -> Array:
    """`layout_words` for records of x [m, k] of a dtype, without addresses and strides of x."""
    task, blocks = layout_words(name, k).copy(), k // FORMATS[name].block
    task[pack.X_ELEMENT], task[pack.COUNT], task[pack.PER_CHUNK] = CODE_OF[x], m * blocks, per_chunk
    task[pack.OUT_ROW] = blocks * layout.record(FORMATS[name]).nbytes
    return task


@lru_cache(maxsize=1024)
def panels_task(name: str, m: int, n: int, k: int, allowed: int, least: int = 1) -> tuple[Array, int, int]:
    """(task array of `loops` without addresses, chunks, threads) of a product under `allowed` threads.

    A chunk has at least `least` panels, if every thread gets four chunks then.
    """
    fmt = FORMATS[name]
    task = np.zeros((3, f.FIELDS), np.int64)
    task[1, f.M], task[1, f.N], task[1, f.K], task[1, f.ALPHA] = m, n, k, f.ONE
    threads = allowed if m * n * k >= SERIAL else 1
    count, panel = -(-n // layout.COLUMNS), layout.COLUMNS * max(1, m * k)
    wanted = min(-(-count // (4 * threads)), max(least, CHUNK // panel))
    per_chunk = max(1, wanted, -(-count // 2**16)) if threads > 1 else count
    words = task[2]
    words[loops.BLOCKS], words[loops.COUNT], words[loops.PER_CHUNK] = k // fmt.block, count, per_chunk
    words[loops.PANEL_BYTES] = k // fmt.block * layout.panel(fmt).nbytes
    words[loops.ROWS_PER_BLOCK], words[loops.LANES] = max(1, m), threads
    return task, -(-count // per_chunk), threads


def point(task: Array, rows: Array, weights: Array, out: Array, bias: Array | None) -> None:
    """Say where the operands of a copy of `panels_task` lie: records or floats, and panels or rows of blocks."""
    d, words = task[1], task[2]
    d[f.OUT], d[f.O_RS], d[f.O_CS], d[f.O_E] = out.ctypes.data, *out.strides, CODE_OF[out.dtype]
    if bias is not None:
        d[f.BIAS], d[f.BIAS_CS], d[f.BIAS_E] = bias.ctypes.data, bias.strides[0], CODE_OF[bias.dtype]
    words[loops.RECORDS], words[loops.RECORD_ROW] = rows.ctypes.data, rows.strides[0]
    words[loops.ROWS_PER_BLOCK] = max(8, ROWS_BYTES // max(1, abs(rows.strides[0])) // 8 * 8)
    words[loops.PANELS] = weights.ctypes.data


def complete(task: Array, name: str, row: int) -> None:
    """Who computes a task of `panels_task`: panels' routines, or, for rows of blocks `row` bytes apart, theirs."""
    words = task[2]
    if row:
        words[loops.ROW], words[loops.PANEL_BYTES] = row, layout.COLUMNS * row
    loops.put_routines(words, int(task[1, f.M]), "blocks" if row else "panels", name)


@lru_cache(maxsize=1024)
def prepared(
    name: str, m: int, n: int, k: int, x: np.dtype[Any], out: np.dtype[Any], allowed: int, row: int = 0
) -> PreparedCall:
    """The call for activations of dtype `x` [m, k] and a result of dtype `out` [m, n]; quantized by one thread.

    `row` is the stride of weights that are read in place, 0 for panels.
    """
    size = k // FORMATS[name].block * layout.record(FORMATS[name]).nbytes
    count = m * (k // FORMATS[name].block)
    quantizing = quantizing_task(name, m, k, x, max(1, count))
    task, chunks, threads = panels_task(name, m, n, k, allowed, IN_PLACE if row else 1)
    product = task.copy()
    product[1, f.O_E], product[2, loops.RECORD_ROW] = CODE_OF[out], size
    complete(product, name, row)
    room = RECORDS_AT + m * size + ALIGN
    return PreparedCall(quantizing, product, min(count, 1), chunks, threads, room, (x.itemsize == 2, out.itemsize == 2))


def _start(control, threads, scratch, stride, entries, call, product, x, panels, out, bias, room, chunks):
    """Fill in the addresses; quantize; run the product. Or return 1: a kernel for `Pool.run`."""
    at = (room.ctypes.data + ALIGN - 1) // ALIGN * ALIGN
    first, second, records = carray(pointer_to_words(at), (pack.WORDS,)), at + TASK_AT, at + RECORDS_AT
    # Element by element: an assignment of arrays brings the words of its error, which compile for seconds.
    for i in range(pack.WORDS):
        first[i] = call[i]
    first[pack.X], first[pack.X_ROW], first[pack.X_COLUMN] = x.ctypes.data, x.strides[0], x.strides[1]
    first[pack.OUT] = records
    rows = carray(pointer_to_words(second), (3, f.FIELDS))
    for i in range(3):
        for j in range(f.FIELDS):
            rows[i, j] = product[i, j]
    rows[1, f.OUT], rows[1, f.O_RS], rows[1, f.O_CS] = out.ctypes.data, out.strides[0], out.strides[1]
    rows[1, f.BIAS], rows[1, f.BIAS_CS], rows[1, f.BIAS_E] = bias
    rows[2, loops.RECORDS], rows[2, loops.PANELS] = records, panels.ctypes.data
    if not take(control, threads):
        return 1
    run_part(control, 1, scratch, stride, entries[0], at, chunks[0])
    run_part(control, threads, scratch, stride, entries[1], second, chunks[1])
    give(control, threads)
    return 0


_starters: dict[tuple[bool, bool], Any] = {}


def _starter(narrow: tuple[bool, bool]) -> Any:
    """`_start` for fp32 or 16-bit elements of x and out, of any strides."""
    from numba import types

    def view(narrow: bool, readonly: bool) -> Any:
        return types.Array(types.uint16 if narrow else types.float32, 2, "A", readonly=readonly, aligned=False)

    i64 = types.int64
    words, many, raw = types.Array(i64, 1, "C"), types.Array(i64, 2, "C"), types.Array(types.uint8, 1, "C")
    mapped = types.Array(types.uint8, 1, "C", readonly=True)
    two, three = types.UniTuple(i64, 2), types.UniTuple(i64, 3)
    views = (view(narrow[0], True), mapped, view(narrow[1], False))
    signature = i64(i64, i64, i64, i64, two, words, many, *views, three, raw, two)
    _starters[narrow] = made = njit(_start, signature=signature)
    return made


_NO_BIAS = (0, 0, 0)


def launch(call: PreparedCall, x: Array, panels: Array, out: Array, bias: Array | None) -> None:
    """Run a prepared call: out [m, n] = x [m, k] times the panels."""
    narrow_x, narrow_out = call.narrow
    if narrow_x:
        x = x.view(np.uint16)
    if narrow_out:
        out = out.view(np.uint16)
    run = _starters.get(call.narrow) or _starter(call.narrow)
    place = _NO_BIAS if bias is None else (bias.ctypes.data, bias.strides[0], CODE_OF[bias.dtype])
    room, chunks, entries = np.empty(call.room, np.uint8), (call.quantizing_chunks, call.product_chunks), _entries()
    arguments = (entries, call.quantizing, call.product, x, panels, out, place, room, chunks)
    pool().run(run, SCRATCH, min(call.threads, call.product_chunks), *arguments)


@lru_cache(maxsize=1)
def _entries() -> tuple[int, int]:
    return address_of(pack.quantize_rows), address_of(loops.run_panels)
