"""Runs validated products on the CPU: descriptors in, one call into compiled code, results in place.

Contracts with the ``fma`` arithmetic have kernels. All others are served by their executable definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base import threads as counts
from ....base.dtypes import FLOAT32
from ....base.seen import Seen
from ....base.threads import get_num_threads
from ....contract.spec import Contract
from ....operands.tensors import uncompiled
from ....planner.device import Item
from ....problem.settings import PLAIN, Settings
from .. import pool as pools
from ..emit import descriptor as f
from ..pool import MAX_CHUNKS, stride_of
from . import measure  # noqa: F401  # which is asked for what decides
from .facts import facts
from .launch import BUSY, Batch, batched, launch_rows, launch_single, likeness, starter
from .packed import PackedWeight
from .schedule import Schedule
from .tasks import Epilogue, Task, task_for

__all__ = ["again", "gemm", "gemm_batched", "gemm_items", "gemm_stack", "learn"]

Array = NDArray[Any]
LINEAR, PRODUCT, LINEAR_INTO, INTO = range(4)  # forms of a call: x @ w.T, a @ b, and both in an array of the caller's
_known: Seen[tuple[Any, ...]] = Seen(1024)
_kinds: Seen[tuple[Any, ...]] = Seen(1024)
_ndarray, _empty = np.ndarray, np.empty
CHUNK_WORK = 2**22  # multiply-adds in a chunk of a batch: enough to hide the claim, small enough to balance


@uncompiled
def gemm(
    a: Array,
    b: Array | PackedWeight,
    out: Array,
    asked: Settings,
    *,
    c: Array | None = None,
    bias: Array | None = None,
    chosen: Schedule | None = None,
) -> None:
    """out = alpha * (a @ b) + beta * c + bias on 2-D views of any strides.

    `chosen` replays a schedule; the bits do not depend on it.
    """
    if _has_kernels(asked.contract):
        epilogue = None if c is None and bias is None and asked.alpha == 1.0 else Epilogue(asked, c, bias)
        launch_single(task_for(a, b, out, epilogue, get_num_threads(), chosen), a, b, out, epilogue)
    else:
        _by_definition([(a, b, out, c)], asked, bias, chosen)


@uncompiled
def again(
    form: int, a: Array, b: Array | PackedWeight, out: Array | None = None, bias: Array | None = None
) -> Array | None:
    """The product, where one of float32 operands like these came before (`learn`); else None, and nothing was written.

    One look-up stands for all that is checked and chosen: small products take no longer than that. It goes by sizes
    alone, since Python makes extents and strides anew whenever they are asked for; compiled code compares those.
    """
    lines, size = (b, b.size) if type(b) is _ndarray else (b.lines, b.shape)  # type: ignore[union-attr]
    known = _known.get((form, bias is None, a.size, size, counts.chosen))
    if known is None:
        return None
    shape, run, room, threads, needed, template, _rows = known
    result, own, added = _empty(shape, FLOAT32) if out is None else out, pools.current, 0 if bias is None else id(bias)
    memory = own.memory  # kept in this frame, as `Pool.run` does, of which this is the usual way
    if memory[0] >= needed and threads <= own.threads:
        missed = run(own.words, threads, memory[1], room, template, id(a), id(lines), id(result), added)
    else:
        missed = BUSY
    if missed == BUSY:
        missed = own.run(run, room, threads, template, id(a), id(lines), id(result), added)
    if missed:
        other = _kinds.get(_kind(form, a, b, out, bias))
        if other is None or other is known:
            return None
        _known.keep((form, bias is None, a.size, size, counts.chosen), other)
        return again(form, a, b, out, bias)
    return result


def _kind(form: int, a: Array, b: Array | PackedWeight, out: Array | None, bias: Array | None) -> tuple[Any, ...]:
    """What calls of one kind have in common: other kinds may have operands of the same sizes.

    Plain and packed weights are two kinds, also where their matrices are alike.
    """
    matrices = a, b.lines if isinstance(b, PackedWeight) else b, out
    likes = (None if x is None else (x.shape, x.strides, x.dtype) for x in matrices)
    return form, bias is None, type(b), b.shape, *likes, get_num_threads()


@uncompiled
def learn(form: int, a: Array, b: Array | PackedWeight, out: Array, bias: Array | None = None) -> None:
    """Let `again` take calls like this one, checked and computed: a plain product, and a bias of numbers side by side.

    Operands are matrices, or of a form without a bias stacks of as many. `out` is new, or the caller's.
    """
    lines, size = (b, b.size) if isinstance(b, np.ndarray) else (b.lines, b.shape)
    if not a.dtype is lines.dtype is out.dtype is FLOAT32 or (out.ndim == 3 and len(out) == 1):
        return
    if bias is not None and (bias.dtype is not FLOAT32 or bias.strides != (4,)):
        return
    likes = [likeness(x) for x in (a, lines, out)]
    into = form in (LINEAR_INTO, INTO)
    if into and min(min(like) for like in likes) < 0:
        return
    threads, added = get_num_threads(), None if bias is None else Epilogue(PLAIN, None, bias)
    if out.ndim == 3 and not isinstance(b, PackedWeight):
        task, batch = _batch_of(a, b, out)
        rows, wanted = batched(task, batch)
    else:
        turned = form in (LINEAR, LINEAR_INTO) and not isinstance(b, PackedWeight)
        task = task_for(a, b.T if turned else b, out, added, threads)  # type: ignore[union-attr]
        rows, wanted = task.rows.copy(), task.threads
    rows[0, f.FLAGS] |= f.COMPARED | (f.INTO if into else 0)
    rows[0, f.LIKE_A : f.LIKE_OUT + f.LIKE_WORDS] = np.ravel(likes)
    room = stride_of(task.scratch)
    known = out.shape, starter(), room, wanted, room * wanted, id(rows), rows
    _kinds.keep(_kind(form, a, b, out if into else None, bias), known)
    _known.keep((form, bias is None, a.size, size, threads), known)


@uncompiled
def gemm_batched(
    a: Array, b: Array, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
) -> None:
    """`gemm` on each item of 3-D operands; strides of 0 share an item."""
    count = out.shape[0]
    if count == 0:
        return
    if count == 1 or not _has_kernels(asked.contract):
        gemm_items([(a[i], b[i], out[i], None if c is None else c[i]) for i in range(count)], asked, bias=bias)
        return
    first = None if c is None else c[0]
    epilogue = None if c is None and bias is None and asked.alpha == 1.0 else Epilogue(asked, first, bias)
    task, batch = _batch_of(a, b, out, c, epilogue)
    if task.copies_c and c is not None:
        out[...] = c
    launch_single(task, a[0], b[0], out[0], epilogue, batch)


def _batch_of(
    a: Array, b: Array, out: Array, c: Array | None = None, epilogue: Epilogue | None = None
) -> tuple[Task, Batch]:
    """The task of an item, for one thread, and how the items follow one another."""
    task, count = task_for(a[0], b[0], out[0], epilogue, 1), out.shape[0]
    threads, per_chunk = chunking(count, task.work * count, task.work)
    step_c = 0 if c is None else c.strides[0]
    return task, Batch(count, per_chunk, a.strides[0], b.strides[0], out.strides[0], step_c, threads)


@uncompiled
def gemm_stack(
    a: Array, b: Array, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
) -> None:
    """`gemm` on each item of a stack whose items lie no constant step apart; all addresses are made at once."""
    where, count = np.ndindex(out.shape[:-2]), math.prod(out.shape[:-2])
    if not _has_kernels(asked.contract) or count < 4 * get_num_threads():  # threads share large items, too
        gemm_items([(a[i], b[i], out[i], None if c is None else c[i]) for i in where], asked, bias=bias)
        return
    first = (0,) * (out.ndim - 2)
    a0, b0, out0, c0 = a[first], b[first], out[first], None if c is None else c[first]
    epilogue = Epilogue(asked, c0, bias)
    task = task_for(a0, b0, out0, epilogue, 1)
    if task.copies_c:
        out[...] = c
    rows = np.empty((count + 1, f.FIELDS), np.int64)
    rows[1:] = task.row_at(a0, b0, out0, epilogue)
    for field, x in zip((f.A, f.B, f.OUT, f.C), (b, a, out, c) if task.swapped else (a, b, out, c), strict=True):
        if x is not None:
            rows[1:, field] += _steps(x)
    _run_rows(rows, task.work * count, task.work, task.scratch)


def _steps(x: Array) -> NDArray[np.int64]:
    """Bytes from the first item of a stack to each."""
    found = np.zeros(1, np.int64)
    for extent, stride in zip(x.shape[:-2], x.strides[:-2], strict=True):
        found = np.add.outer(found, np.arange(extent) * stride).ravel()
    return found


@uncompiled
def gemm_items(items: Sequence[Item], asked: Settings, *, bias: Array | None = None) -> None:
    """`gemm` on each (a, b, out, c); sizes may differ."""
    if not _has_kernels(asked.contract):
        _by_definition(items, asked, bias)
    elif len(items) == 1:
        a, b, out, c = items[0]
        gemm(a, b, out, asked, c=c, bias=bias)
    elif items:
        _run_group(items, asked, bias)


def _has_kernels(contract: Contract) -> bool:
    return contract.arithmetic == "fma" and contract.order.kind == "chain"


def _by_definition(items: Sequence[Item], asked: Settings, bias: Array | None, chosen: Schedule | None = None) -> None:
    """Leaves of ``fma`` from its chains, its lanes, integers; all else by the definition itself, exact and slower."""
    from ....contract import reference
    from .exact import exact_product
    from .lanes import sums_of_lanes
    from .leaves import sums_of_leaves

    for a, b, out, c in items:
        if asked.contract.arithmetic == "exact":
            exact_product(partial(gemm, chosen=chosen), a, b, out)
            continue
        b = b.unpack().T if isinstance(b, PackedWeight) else b
        start, added = (c, None) if asked.accumulate else (None, c)
        if asked.contract.order.kind == "lanes":
            sums = sums_of_lanes(a, b)
        elif asked.contract.arithmetic == "fma":
            into = out if out.dtype == FLOAT32 and added is None else np.empty(out.shape, np.float32)
            sums = sums_of_leaves(gemm, a, b, asked.contract, start, into)
            if sums is out and a.shape[1] and asked.alpha == 1 and bias is None:
                continue  # as the last leaf's epilogue left it
        else:
            sums = reference.evaluate(a, b, asked.contract, start)
        out[...] = reference.epilogue(sums, alpha=asked.alpha, beta=asked.beta, c=added, bias=bias, out_dtype=out.dtype)


def _run_group(items: Sequence[Item], asked: Settings, bias: Array | None) -> None:
    """Products with operands of their own, in one task array; large ones are cut into chunks of their own."""
    alone = get_num_threads() if len(items) < 4 * get_num_threads() else 1
    rows = np.empty((len(items) + 1, f.FIELDS), np.int64)
    work = largest = scratch = chunks = 0
    for i, (a, b, out, c) in enumerate(items):
        epilogue = Epilogue(asked, c, bias)
        task = task_for(a, b, out, epilogue, alone)
        if task.copies_c:
            out[...] = c
        rows[1 + i] = task.row_at(a, b, out, epilogue)
        work, largest = work + task.work, max(largest, task.work)
        scratch, chunks = max(scratch, task.scratch), chunks + task.chunks
    if alone > 1 and work >= 2 * facts().serial:
        rows[0] = 0
        rows[0, 0] = len(items)
        launch_rows(rows, chunks, scratch, get_num_threads())
    else:
        _run_rows(rows, work, largest, scratch)


def chunking(count: int, work: int, largest: int, allowed: int | None = None) -> tuple[int, int]:
    """(threads, products per chunk) for `count` products of `work` multiply-adds in all."""
    threads = get_num_threads() if allowed is None else allowed
    if work < 2 * facts().serial or threads == 1:
        return 1, count
    some = max(1, min(count // (4 * threads), CHUNK_WORK // max(1, largest)))
    return threads, max(some, -(-count // MAX_CHUNKS))


def _run_rows(rows: NDArray[np.int64], work: int, largest: int, scratch: int) -> None:
    """Whole products, several to a chunk when they are small."""
    count = len(rows) - 1
    rows[1:, f.GRID_M] = rows[1:, f.GRID_N] = 1
    threads, per_chunk = chunking(count, work, largest)
    rows[0] = 0
    rows[0, 0], rows[0, 1] = count, per_chunk
    launch_rows(rows, -(-count // per_chunk), scratch, threads)
