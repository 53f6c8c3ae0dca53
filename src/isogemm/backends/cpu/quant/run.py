"""Quantized matrices as wholes: blocks cut into chunks that threads take."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ....base.dtypes import CODE_OF
from ....formats.blocks import BlockFormat
from ..emit.entries import address_of
from ..pool import run_task
from . import blocks
from .encode import entry

Array = npt.NDArray[Any]

_CHUNK = 2**14  # elements: tens of microseconds, many times what it costs to claim one
_CHUNKS = 2**16


def dequantize(rows: Array, fmt: BlockFormat, out: Array) -> None:
    """Rows of blocks [n, row bytes], bytes adjacent, into `out` [n, k], columns adjacent: the reference's bits."""
    task, chunks = _task(fmt, out.shape)
    task[blocks.SOURCE], task[blocks.SOURCE_ROW] = rows.ctypes.data, rows.strides[0]
    task[blocks.OUT], task[blocks.OUT_ROW] = out.ctypes.data, out.strides[0]
    task[blocks.OUT_ELEMENT], task[blocks.ROUTINE] = CODE_OF[out.dtype], blocks.decoder(fmt.name)
    if chunks:
        run_task(address_of(blocks.dequantize_blocks), task, chunks, blocks.SCRATCH)


def quantize(x: Array, fmt: BlockFormat, out: Array) -> int:
    """x [n, k] of any strides into rows of blocks; 0, or what was wrong: `NOT_FINITE` or `OVERFLOW`."""
    task, chunks = _task(fmt, x.shape)
    flag = np.zeros(1, np.int64)
    task[blocks.SOURCE], task[blocks.SOURCE_ROW], task[blocks.SOURCE_COLUMN] = x.ctypes.data, *x.strides
    task[blocks.SOURCE_ELEMENT], task[blocks.FLAG] = CODE_OF[x.dtype], flag.ctypes.data
    task[blocks.OUT], task[blocks.OUT_ROW] = out.ctypes.data, out.strides[0]
    task[blocks.ROUTINE] = entry.encoder(fmt.name)
    if chunks:
        run_task(address_of(entry.quantize_blocks), task, chunks, entry.SCRATCH)
    return int(flag[0])


def _task(fmt: BlockFormat, shape: tuple[int, ...]) -> tuple[Array, int]:
    n, k = shape
    count = n * (k // fmt.block)
    per_chunk = max(1, _CHUNK // fmt.block, -(-count // _CHUNKS))
    task = np.zeros(blocks.WORDS, np.int64)
    task[blocks.FORMAT], task[blocks.BLOCK], task[blocks.BLOCK_BYTES] = blocks.CODE[fmt.name], fmt.block, fmt.nbytes
    task[blocks.SUB], task[blocks.COUNT], task[blocks.PER_CHUNK] = fmt.sub, count, per_chunk
    task[blocks.PER_ROW] = k // fmt.block
    return task, -(-count // per_chunk)
