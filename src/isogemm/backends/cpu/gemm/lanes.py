"""Products under ``fma/lanes32``: a weight row is read as it lies, 32 k at a time, one vector of lanes to an output.

    lane[l] = fma(x[i, k], w[j, k], lane[l])        k = l, l + 32, l + 64, ...
    out[i, j] = the lanes by XOR: l meets l + 16, then l + 8, + 4, + 2, + 1

The compiler makes one vector of 32 from as many registers as it takes. x is fp32 and w of any type, contiguous in k. A
tail of K changes its own lanes alone: adding a product of zeros would turn -0 into +0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ....base.dtypes import CODE_OF
from ....contract.spec import LANES
from ..emit.entries import address_of
from ..emit.target import target
from ..emit.vectors import ELEMENT_BYTES, F32_BYTES, I32, Emitter, define
from ..pool import run_task

# Outputs at once: as many as leave registers for operands beside four (or two) of them to an output.
ROWS, COLUMNS = (4, 2) if target().width == 16 else (1, 2)
WORK = 2**18  # multiply-adds of a chunk, at least: some tens of microseconds
HEADER = 8
OUT, OUT_RS, X, X_RS, W, W_RS, K, M, N, PER_CHUNK = range(HEADER, HEADER + 10)
WORDS = HEADER + 10


def sums_of_lanes(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float32]:
    """The accumulators of a [m, k] @ b [k, n]; operands that are not contiguous in k are copied."""
    x, w = np.ascontiguousarray(a, np.float32), b.T
    if w.strides[1] != w.itemsize or not w.flags.aligned:
        w = np.ascontiguousarray(w)
    (m, k), n = x.shape, len(w)
    out = np.empty((m, n), np.float32)
    if not out.size:
        return out
    per_chunk = -(-max(COLUMNS, WORK // max(1, m * k)) // COLUMNS) * COLUMNS
    task = np.zeros(WORDS, np.int64)
    task[OUT:] = (
        out.ctypes.data, out.strides[0], x.ctypes.data, x.strides[0], w.ctypes.data, w.strides[0], k, m, n, per_chunk,
    )  # fmt: skip
    run_task(address_of(_chunk_of(CODE_OF[w.dtype])), task, -(-n // per_chunk), 0)
    return out


@cache
def _chunk_of(element: int) -> Callable[..., None]:
    """Some columns for all rows; weight rows of a turn stay in cache while the rows of x pass."""

    def chunk_of_lanes(task, chunk, scratch):
        t = carray(task, (WORDS,))
        last = min(t[N], (chunk + 1) * t[PER_CHUNK])
        for j in range(chunk * t[PER_CHUNK], last, COLUMNS):
            for i in range(0, t[M], ROWS):
                columns, rows = min(COLUMNS, last - j), min(ROWS, t[M] - i)
                out, x = t[OUT] + i * t[OUT_RS] + j * F32_BYTES, t[X] + i * t[X_RS]
                w = t[W] + j * t[W_RS]
                if rows == ROWS and columns == COLUMNS:
                    lanes_of(element, ROWS, COLUMNS, out, t[OUT_RS], x, t[X_RS], w, t[W_RS], t[K])
                else:
                    for r in range(rows):
                        for c in range(columns):
                            lanes_of(
                                element, 1, 1, out + r * t[OUT_RS] + c * F32_BYTES, t[OUT_RS],
                                x + r * t[X_RS], t[X_RS], w + c * t[W_RS], t[W_RS], t[K],
                            )  # fmt: skip

    return chunk_of_lanes


def _emit(e: Emitter, element: int, rows: int, columns: int, args: tuple[Any, ...]) -> None:
    out, out_rs, x, x_rs, w, w_rs, k = args
    inputs = [e.at(x, e.b.mul(x_rs, e.i64(r))) for r in range(rows)]
    weights = [e.at(w, e.b.mul(w_rs, e.i64(c))) for c in range(columns)]
    acc = [[e.slot(e.vec) for _ in weights] for _ in inputs]
    for slot in (slot for line in acc for slot in line):
        e.b.store(ir.Constant(e.vec, None), slot)

    def step(kk: Any, count: Any) -> None:
        xs = [e.load_widened(e.at(address, e.times(kk, F32_BYTES)), 0, count) for address in inputs]
        ws = [e.load_widened(e.at(address, e.times(kk, ELEMENT_BYTES[element])), element, count) for address in weights]
        for value, line in zip(xs, acc, strict=True):
            for weight, slot in zip(ws, line, strict=True):
                before = e.b.load(slot, typ=e.vec)
                after = e.fma(value, weight, before)
                e.b.store(after if count is None else e.b.select(e.below(count, LANES), after, before), slot)

    whole = e.b.and_(k, e.i64(-LANES))
    with e.loop(whole, step=LANES) as kk:
        step(kk, None)
    rest = e.b.sub(k, whole)
    with e.b.if_then(e.b.icmp_signed(">", rest, e.i64(0))):
        step(whole, rest)
    for r, line in enumerate(acc):
        for c, slot in enumerate(line):
            e.store(_met(e, e.b.load(slot, typ=e.vec)), e.at(out, e.b.mul(out_rs, e.i64(r)), c * F32_BYTES))


def _met(e: Emitter, lanes: Any) -> Any:
    """Order-critical: halves meet, the widest distance first."""
    half = LANES // 2
    while half:
        lanes = e.b.fadd(
            e.shuffle(lanes, lanes, list(range(half))), e.shuffle(lanes, lanes, list(range(half, 2 * half)))
        )
        half //= 2
    return e.b.extract_element(lanes, ir.Constant(I32, 0))


@intrinsic(prefer_literal=True)
def lanes_of(typingctx, element, rows, columns, out, out_rs, x, x_rs, w, w_rs, k):
    """out[r, c] for `rows` rows of x and `columns` rows of w, whose numbers, and w's type, are constants."""
    fixed = tuple(v.literal_value for v in (element, rows, columns))

    def codegen(context, builder, signature, args):
        routine = define(
            builder.module, "isogemm_lanes_{}_{}_{}".format(*fixed), 7, lambda e, *xs: _emit(e, *fixed, xs), LANES
        )
        builder.call(routine, args[3:])

    return types.void(element, rows, columns, *[types.int64] * 7), codegen
