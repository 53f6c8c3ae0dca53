"""Task descriptors: everything about a call but its addresses, made once per kind of call and kept."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.arguments import nearest_float32
from ....base.dtypes import CODE_OF
from ....base.seen import Seen
from ....problem.settings import PLAIN, Settings
from ..emit import descriptor as f
from ..emit.entries import address_of
from ..emit.target import target
from ..emit.vectors import FLOAT32
from . import panels
from .facts import facts, learn_facts
from .gemv import GROUP
from .loops import scratch_bytes
from .micro import HALF, NR
from .packed import PackedWeight
from .quads import columns_at_once, fits, fits_in_cache, from_memory
from .routines import made, routine
from .run_chunk import run_chunk
from .schedule import SHARED_BYTES, Problem, Schedule, check_legal, schedule
from .skinny import few_rows_scratch

Array = NDArray[Any]

_A_MODES = {"block": f.PACK_BLOCK, "all": f.PACK_ALL, "in place": f.A_IN_PLACE}
_B_MODES = {"block": f.PACK, "prepared": f.PREPARED, "in place": f.B_IN_PLACE}
_STRATEGIES = {"gemv": f.GEMV, "stream": f.STREAM}
_FEW = {f.GEMV: "gemv", f.STREAM: "stream", f.QUADS: "quads", f.PANELS: "panels"}
_tasks: Seen[Task] = Seen(1024)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to the accumulator, and what it starts from."""

    asked: Settings
    c: Array | None = None
    bias: Array | None = None

    def key(self) -> tuple[Any, ...]:
        """Everything but addresses."""
        asked, c, bias = self.asked, self.c, self.bias
        return (
            asked.alpha or str(asked.alpha),  # 0.0 equals -0.0, whose products have the other sign
            asked.beta,
            asked.accumulate,
            None if c is None else (c.strides, c.dtype.char),
            None if bias is None else (bias.strides, bias.dtype.char),
        )


@dataclass(frozen=True, slots=True)
class Task:
    """A descriptor without addresses, and how it is run."""

    rows: NDArray[np.int64]  # int64 [2, FIELDS]: header and descriptor, ready for a single product
    swapped: bool  # A and B have changed places
    copies_c: bool  # the output is the accumulator and has to hold C before the walk starts (accumulate)
    work: int  # multiply-adds
    chunks: int
    scratch: int
    threads: int

    def row_at(self, a: Array, b: Array | PackedWeight, out: Array, epilogue: Epilogue) -> NDArray[np.int64]:
        """The descriptor with addresses."""
        row: NDArray[np.int64] = self.rows[1].copy()
        b = b.lines if isinstance(b, PackedWeight) else b
        first, second = (b, a) if self.swapped else (a, b)
        row[f.A], row[f.B], row[f.OUT] = first.ctypes.data, second.ctypes.data, out.ctypes.data
        add_epilogue(row, epilogue)
        return row


def add_epilogue(row: NDArray[np.int64], epilogue: Epilogue) -> None:
    """Addresses of C and bias."""
    if epilogue.c is not None:
        row[f.C] = epilogue.c.ctypes.data
    if epilogue.bias is not None:
        row[f.BIAS] = epilogue.bias.ctypes.data


def task_for(
    a: Array,
    b: Array | PackedWeight,
    out: Array,
    epilogue: Epilogue | None,
    threads: int,
    chosen: Schedule | None = None,
) -> Task:
    """The task for a call like this one."""
    key = (
        a.shape,
        b.shape,
        a.strides,
        None if isinstance(b, PackedWeight) else b.strides,
        out.strides,
        a.dtype.char,
        b.dtype.char,
        out.dtype.char,
        threads,
        chosen,
        None if epilogue is None else epilogue.key(),
    )
    task = _tasks.get(key)
    if task is None:
        learn_facts(made)
        task = _tasks.keep(key, _make(a, b, out, epilogue, threads, chosen))
    return task


def swap_operands(m: int, n: int, row_stride: int, column_stride: int, itemsize: int) -> bool:
    """Whether C^T = B^T A^T is computed instead: column-major outputs, and few columns made few rows. Same bits."""
    if column_stride != itemsize and row_stride == itemsize and m > 1:
        return True
    return n < m and n <= 8


def _make(
    a: Array,
    b: Array | PackedWeight,
    out: Array,
    epilogue: Epilogue | None,
    threads: int,
    chosen: Schedule | None,
) -> Task:
    asked, c, bias = (epilogue.asked, epilogue.c, epilogue.bias) if epilogue else (PLAIN, None, None)
    prepared = isinstance(b, PackedWeight)
    m, n = out.shape
    k = a.shape[1]
    row = np.zeros(f.FIELDS, np.int64)
    row[f.M], row[f.N], row[f.K] = m, n, k
    _strides(row, f.A, a)
    if isinstance(b, PackedWeight):
        row[f.B_E] = CODE_OF[b.dtype]
    else:
        _strides(row, f.B, b)
    _strides(row, f.OUT, out)
    if c is not None and asked.reads_c:
        _strides(row, f.C, c)
    if bias is not None:
        row[f.BIAS_CS], row[f.BIAS_E] = bias.strides[0], CODE_OF[bias.dtype]
    row[f.ALPHA], row[f.BETA] = float32_bits(asked.alpha), float32_bits(asked.beta)
    row[f.START] = int(asked.accumulate)
    swapped = not prepared and swap_operands(m, n, out.strides[0], out.strides[1], out.itemsize)
    if swapped:
        _swap(row)
        m, n = n, m
    nothing_after = asked.alpha == 1.0 and asked.beta == 0.0 and bias is None
    plain = nothing_after and row[f.O_E] == FLOAT32 and (row[f.O_CS] == 4 or n == 1)
    row[f.PLAIN] = int(plain)
    b_bytes = 4 if row[f.B_E] == FLOAT32 else 2
    problem = Problem(
        m, n, k, bool(row[f.A_E] == FLOAT32), bool(row[f.B_RS] == b_bytes), bool(row[f.B_CS] == b_bytes),
        b_bytes, prepared, bool(plain),
    )  # fmt: skip
    if chosen is not None:
        check_legal(problem, chosen, target())
    s = chosen or schedule(problem, threads, target())
    _apply(row, s)
    _routines(row, s)
    rows = np.zeros((2, f.FIELDS), np.int64)
    chunks = s.grid_m * s.grid_n
    rows[0, 0], rows[1] = 1, row
    rows[0, f.FUNCTION], rows[0, f.CHUNKS] = address_of(run_chunk), chunks
    rows[0, f.FLAGS] = f.SWAPPED if swapped else 0
    copies_c = bool(plain and asked.accumulate)
    return Task(
        rows, swapped, copies_c, m * n * k, chunks, _scratch(problem, s, int(row[f.NR_PANEL])), min(s.threads, chunks)
    )


def float32_bits(value: float) -> int:
    """The bits of a number rounded to float32, whatever a processor was told about rounding and subnormals."""
    if value == 0:  # of which there are two, and a table of equals has one
        return 0x80000000 if math.copysign(1.0, value) < 0 else 0
    return _bits(value)


@lru_cache(maxsize=256)
def _bits(value: float) -> int:
    if abs(value) < 2.0**-126:  # in whole steps, sign apart: no instruction sees the result
        return round(math.ldexp(abs(value), 149)) | (0x80000000 if value < 0 else 0)
    return int(struct.unpack("<I", struct.pack("<f", nearest_float32(value)))[0])


def _strides(row: NDArray[np.int64], at: int, x: Array) -> None:
    row[at + 1], row[at + 2], row[at + 3] = x.strides[0], x.strides[1], CODE_OF[x.dtype]


def _swap(row: NDArray[np.int64]) -> None:
    row[f.M], row[f.N] = row[f.N], row[f.M]
    a, b = row[f.A : f.A + 4].copy(), row[f.B : f.B + 4].copy()
    row[f.A : f.A + 4], row[f.B : f.B + 4] = b, a
    for at in (f.A, f.B, f.OUT, f.C, f.BIAS):
        row[at + 1], row[at + 2] = row[at + 2], row[at + 1]


def _apply(row: NDArray[np.int64], s: Schedule) -> None:
    row[f.STRATEGY] = _walk(row, s)
    row[f.A_MODE], row[f.B_MODE] = _A_MODES[s.a_mode], _B_MODES[s.b_mode]
    row[f.MC], row[f.NC], row[f.KC], row[f.MR_PANEL] = max(1, s.mc), max(1, s.nc), max(1, s.kc), s.mr
    row[f.GRID_M], row[f.GRID_N] = s.grid_m, s.grid_n
    strips = row[f.STRATEGY] == f.QUADS
    share = int(row[f.N]) // max(1, s.grid_n)
    row[f.NR_PANEL] = columns_at_once(int(row[f.M]), int(row[f.B_E]), share) if strips else target().nr


def _walk(row: NDArray[np.int64], s: Schedule) -> int:
    """The kernel of a schedule, and what it asks for: few rows have several, by where their weights may lie."""
    m, line, element = int(row[f.M]), int(row[f.B_CS]), int(row[f.B_E])
    of_row = int(row[f.K]) * (4 if element == FLOAT32 else 2)
    nbytes = int(row[f.N]) * of_row
    seen = 0 if nbytes <= SHARED_BYTES else f.NEVER_SEEN
    few = s.strategy in _STRATEGIES
    if s.b_mode == "prepared":
        if few and panels.serves(m, nbytes):
            return f.PANELS
        row[f.SEEN], row[f.FROM_MEMORY] = seen, facts().tile_ahead & ~f.CONTINUES
        return f.TILED
    if not few:
        return f.TILED
    if s.strategy == "gemv" and fits(m, line, of_row, element):
        stays = nbytes <= facts().seen_bytes and fits_in_cache(m, line, element)
        row[f.SEEN], row[f.FROM_MEMORY] = 0 if stays else f.NEVER_SEEN, from_memory(m, line, of_row, element)
        return f.QUADS
    row[f.SEEN] = seen
    return _STRATEGIES[s.strategy]


def _routines(row: NDArray[np.int64], s: Schedule) -> None:
    """Compile, or look up, what the schedule calls."""
    a, b = int(row[f.A_E]), int(row[f.B_E])
    if row[f.STRATEGY] != f.TILED:
        kind = _FEW[int(row[f.STRATEGY])]
        row[f.FEW] = routine("gemv_groups" if kind == "gemv" and row[f.M] > GROUP else kind, b)
        row[f.PACK_A] = routine("pack", a)
        return
    if s.a_mode != "in place":
        row[f.PACK_A] = routine("pack", a)
    if s.b_mode != "prepared":  # in place too: the last, narrower panel is packed
        row[f.PACK_B] = routine("pack", b)
    wide = FLOAT32 if s.b_mode != "prepared" else b
    packed = s.a_mode != "in place" and wide == FLOAT32
    row[f.TILE] = routine("tile_packed" if packed else "tile_direct", wide)
    if 0 < row[f.N] % NR <= HALF:
        row[f.HALF] = routine("half_packed" if packed else "half_direct", wide)


def _scratch(p: Problem, s: Schedule, columns: int) -> int:
    """Bytes for the largest chunk, which is whole register tiles, or `columns` of a walk at once."""
    panels = -(-p.n // columns)
    m, n = -(-p.m // s.grid_m) + s.mr, -(-panels // s.grid_n) * columns
    few = few_rows_scratch(p.m, n, p.k) if s.strategy in _STRATEGIES else 0
    if few and s.b_mode != "prepared":
        return few
    return max(few, scratch_bytes(m, n, p.k, mc=s.mc, nc=s.nc, kc=s.kc, a_all=s.a_mode == "all", plain=p.plain))
