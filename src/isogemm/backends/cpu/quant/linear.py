"""Quantized activations times quantized weights on the CPU: ``int32/chain``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....base.dtypes import CODE_OF
from ....base.threads import get_num_threads
from ....formats.blocks import BlockFormat
from ..emit import descriptor as f
from ..emit.entries import address_of
from ..emit.target import target
from ..pool import ALIGN, run_task
from . import launch, layout, loops, pack
from .blocks import decoder
from .launch import ACTIVATIONS, layout_words, panels_task, quantizing_task

Array = npt.NDArray[Any]

HUGE = 2**21
ALONE = 3 * ACTIVATIONS  # elements of activations that one thread quantizes sooner than two would meet


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Panels:
    """A quantized weight as the kernels read it: laid out for them, a second copy of its bytes; or its own bytes."""

    data: Array  # uint8 array: the copy; or row 0 of the blocks, where they are read in place
    seconds: float  # what it took to make
    row: int = 0  # bytes from row to row of blocks that are read in place; 0 for a copy
    nbytes: int = 0  # bytes of the copy; 0 where there is none

    def __repr__(self) -> str:
        how = "read in place" if self.row else f"made in {1e3 * self.seconds:.1f} ms"
        return f"Panels({self.nbytes} bytes, {how})"


def prepare(rows: Array, fmt: BlockFormat, k: int, native: bool = False) -> Panels:
    """The panels of rows of blocks [n, row bytes]; or the rows themselves, to be read in place."""
    started = time.perf_counter()
    if native:
        return _in_place(rows)
    n, blocks, p = len(rows), k // fmt.block, layout.panel(fmt)
    count = -(-n // layout.COLUMNS)
    size = count * blocks * p.nbytes
    data = _zeros(size)
    task = layout_words(fmt.name, k).copy()
    task[pack.SOURCE], task[pack.SOURCE_ROW], task[pack.N] = rows.ctypes.data, rows.strides[0], n
    task[pack.OUT], task[pack.DECODER] = data.ctypes.data, decoder(fmt.name)
    if size:
        run_task(address_of(pack.pack_panel), task, count, pack.SCRATCH)
    return Panels(data, time.perf_counter() - started, nbytes=size)


def _in_place(rows: Array) -> Panels:
    """Rows of blocks [n, row bytes] to be read where they are; fewer than 16 of them, or equal ones, are copied."""
    n, size = rows.shape
    row = rows.strides[0]
    if n >= layout.COLUMNS and row:
        return Panels(rows[0], 0.0, row)
    # Kernels read 16 rows; those that are missing stand before the first.
    room = np.zeros((max(n, layout.COLUMNS), size), np.uint8)
    room[len(room) - n :] = rows
    return Panels(room[len(room) - n] if n else room[0], 0.0, size, room.nbytes)


def _zeros(size: int) -> Array:
    """Bytes that are walked again and again: in huge pages where the system has them.

    Memory that an allocator hands out a second time keeps its small pages, so large ones are mapped anew.
    """
    import mmap

    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        room = np.zeros(size + ALIGN, np.uint8)
        return room[-room.ctypes.data % ALIGN :][:size]
    mapped = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(mapped, np.uint8)
    return room[-room.ctypes.data % HUGE :][:size]


def quantize_activations(x: Array, fmt: BlockFormat) -> Array:
    """Records [m, k / block * record bytes] of x [m, k]."""
    m, k = x.shape
    count, row = m * (k // fmt.block), k // fmt.block * layout.record(fmt).nbytes
    room = np.empty(m * row + ALIGN, np.uint8)
    records = room[-room.ctypes.data % ALIGN :][: m * row].reshape(m, row)
    per_chunk = max(1, ACTIVATIONS // fmt.block, -(-count // 2**16))
    task = quantizing_task(fmt.name, m, k, x.dtype, per_chunk)
    task[pack.X], task[pack.X_ROW], task[pack.X_COLUMN] = x.ctypes.data, *x.strides
    task[pack.OUT] = records.ctypes.data
    chunks = -(-count // per_chunk)
    if chunks:
        run_task(address_of(pack.quantize_rows), task, chunks, pack.SCRATCH, 1 if chunks < 4 else None)
    return records


def gemm(x: Array, panels: Panels, fmt: BlockFormat, out: Array, bias: Array | None = None) -> None:
    """out = x @ w.T + bias on 2-D views of any strides, with the bits of `isogemm.contract.int32`.

    Parameters
    ----------
    x : array [m, k]
        float32, bfloat16 or float16.
    panels : Panels
        Of w [n, k].
    fmt : BlockFormat
        Its format.
    out : array [m, n]
    bias : array [n], optional
    """
    if not out.size:
        return
    (m, k), n = x.shape, out.shape[1]
    if m * k <= ALONE:
        call = launch.prepared(fmt.name, m, n, k, x.dtype, out.dtype, get_num_threads(), panels.row)
        launch.launch(call, x, panels.data, out, bias)
        return
    records = quantize_activations(x, fmt)
    _run(records, x.shape, panels, fmt, out, bias)


def rounds_to(dtype: np.dtype[Any]) -> bool:
    """Whether `gemm_floats` can round weights to a type: to float16 only where the CPU converts it."""
    return dtype != np.float16 or target().half


def gemm_floats(
    x: Array, panels: Panels, fmt: BlockFormat, out: Array, bias: Array | None = None, dtype: Any = np.float32
) -> None:
    """out = x @ dequantized w.T + bias, with the bits of ``fma/chain``: for few rows.

    Parameters
    ----------
    x : array [m, k]
        float32 with adjacent columns, or any other float type, which is widened.
    panels, fmt, out, bias
        As in `gemm`.
    dtype : dtype
        What dequantized weights are rounded to, one that `rounds_to` has.
    """
    if x.dtype != np.float32 or x.strides[1] != 4 or not x.flags.aligned:
        x = np.ascontiguousarray(x, np.float32)
    if out.size:
        _run(x, x.shape, panels, fmt, out, bias, CODE_OF[np.dtype(dtype)])


def values(panels: Panels, fmt: BlockFormat, k: int, first: int, out: Array) -> None:
    """Columns from `first`, a multiple of 16, of the dequantized weight's transpose into out [k, columns].

    `out` is float32 with adjacent columns, a multiple of 16 of them; those behind n are 0 * d, that is anything.
    """
    blocks, size = k // fmt.block, layout.panel(fmt).nbytes
    task, count = np.zeros((3, f.FIELDS), np.int64), out.shape[1] // layout.COLUMNS
    words = task[2]
    words[loops.RECORDS], words[loops.RECORD_ROW] = out.ctypes.data, out.strides[0]
    words[loops.PANELS] = panels.data.ctypes.data + first // layout.COLUMNS * blocks * size
    words[loops.BLOCKS], words[loops.COUNT], words[loops.PER_CHUNK] = blocks, count, 1
    words[loops.PANEL_BYTES], words[loops.ROUTINE] = blocks * size, loops.routine("floats", fmt.name, 0)
    run_task(address_of(loops.write_values), task, count, loops.SCRATCH)


def _run(
    rows: Array, shape: tuple[int, int], panels: Panels, fmt: BlockFormat, out: Array, bias: Array | None,
    element: int | None = None,
) -> None:  # fmt: skip
    """Rows of activations and all panels: records, or floats and weights that are rounded to an element type."""
    (m, k), n = shape, out.shape[1]
    least = launch.IN_PLACE if panels.row else 1
    template, chunks, threads = panels_task(fmt.name, m, n, k, get_num_threads(), least)
    task = template.copy()
    launch.point(task, rows, panels.data, out, bias)
    if element is None:
        launch.complete(task, fmt.name, panels.row)
    else:
        loops.put_routines(task[2], m, "floats", fmt.name, element)
    run_task(address_of(loops.run_panels), task, chunks, loops.SCRATCH, threads)
