"""The facts of this machine, by timing kernels beside one another: some tenths of a second, once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ....base.threads import get_num_threads
from ..emit import descriptor as f
from ..emit.target import target
from . import facts
from .facts import FEW_ROWS, TILE_AHEAD, Facts, set_facts
from .launch import launch_single
from .packed import ALIGN, PackedWeight
from .tasks import Task, task_for

ROUNDS = 9
SWEEPS = 3  # over sizes: what disturbs one is seldom there in the next
STORE = 2**26  # bytes of weights that are walked one after another, so that none of them lies in a cache
Array = NDArray[np.float32]
Run = Callable[[], object]


def measure(usual: Facts) -> Facts:
    """What is the fastest here; `usual` where nothing decides."""
    store = np.ones(STORE // 4 + ALIGN, np.float32)
    first = -store.ctypes.data % ALIGN // 4
    store = store[first : first + STORE // 4]
    try:
        found = _skinny(store, usual)
        found = replace(found, gemv_rows=_gemv_rows(store, found), stream_rows=_stream_rows(store, found))
        found = replace(found, seen_bytes=_seen_bytes(store, usual), tile_ahead=_tile_ahead(store, usual))
        found = replace(found, serial=_serial(usual), ridge=_ridge(store, usual), source="measured")
    finally:
        set_facts(usual)
    return found


def _margin(usual: bool) -> float:
    """How much slower a way may be: where it is what is usual, a twentieth decides nothing against it, nor for it."""
    return 1.05 if usual else 0.95


def times(runs: Sequence[Run], rounds: int = ROUNDS) -> list[float]:
    """The least seconds of each, taken in turns: what disturbs one round disturbs all."""
    least = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            started = time.perf_counter()
            run()
            least[i] = min(least[i], time.perf_counter() - started)
    return least


def _product(m: int, w: Array | PackedWeight, facts: Facts, threads: int = 1) -> Run:
    """x @ w.T as these facts have it."""
    set_facts(facts)
    n, k = w.shape
    x, out, b = np.ones((m, k), np.float32), np.empty((m, n), np.float32), w.T if isinstance(w, np.ndarray) else w
    task = task_for(x, b, out, None, threads)
    return lambda: launch_single(task, x, b, out, None)


def _gemv_rows(store: Array, usual: Facts) -> int:
    """Where packing begins to win, between 8 rows and 64."""
    w, best = store[: 509 * 510].reshape(509, 510), 8
    for rows in (12, 16, 24, 32, 48, 64):
        walked, packed = times([_product(rows, w, replace(usual, gemv_rows=r)) for r in (rows, 0)])
        if walked > packed * _margin(rows <= usual.gemv_rows):
            break
        best = rows
    return best


def _stream_rows(store: Array, usual: Facts) -> int:
    """Where packing rows of B [k, n] begins to win, between FEW_ROWS and 16."""
    w, best = store[: 509 * 510].reshape(509, 510).T, FEW_ROWS
    for rows in (8, 12, 16):
        streamed, packed = times([_product(rows, w, replace(usual, stream_rows=r)) for r in (rows, FEW_ROWS)])
        if streamed > packed * _margin(rows <= usual.stream_rows):
            break
        best = rows
    return best


def _skinny(store: Array, usual: Facts) -> Facts:
    """Up to how many rows panels of as much of K as is there, used as soon as they are packed, beat blocks.

    They do where the end of a register tile costs much; then blocks of more of K are the faster ones, too.
    """
    w, best = store[: 509 * 2044].reshape(509, 2044), usual
    for rows in (256, 384, 512):
        deep = replace(usual, skinny_rows=rows, skinny_depth=2048, block_depth=1024)
        panels, blocks = times([_product(rows, w, deep), _product(rows, w, best)])
        if panels > blocks * _margin(usual=False):
            break
        best = deep
    return best


def _panels(store: Array, n: int, k: int) -> list[PackedWeight]:
    """As many packed weights as `store` has room for."""
    nr = target().nr
    each = n // nr * k * nr
    pieces = store[: len(store) // each * each].reshape(-1, n // nr, k, nr)
    return [PackedWeight((n, k), piece) for piece in pieces]


def _seen_bytes(store: Array, usual: Facts) -> int:
    """The largest of some sizes, up to which asking for weights that lie in a cache is no help."""
    sizes, k = [1 << i for i in range(18, 25)], 1430
    least = dict.fromkeys(sizes, (float("inf"), float("inf")))
    for _ in range(SWEEPS):
        for size in sizes:
            w = store[: size // (4 * k) * k].reshape(-1, k)
            x, out = np.ones((1, k), np.float32), np.empty((1, len(w)), np.float32)
            ways = []
            for seen in (f.NEVER_SEEN, 0):
                task = task_for(x, w.T, out, None, 1)
                task = replace(task, rows=task.rows.copy())
                task.rows[1, f.SEEN] = seen
                ways.append(partial(_again, task, x, w, out))
            found = times(ways, 3)
            least[size] = min(least[size][0], found[0]), min(least[size][1], found[1])
    helps = [not_asked > asked * _margin(size <= usual.seen_bytes) for size, (asked, not_asked) in least.items()]
    return max(sizes[0], _first_won(sizes, helps) // 2)


def _tile_ahead(store: Array, usual: Facts) -> int:
    """How far ahead eight rows ask for packed weights from memory; 0, not at all."""
    weights, x, out = _panels(store, 256, 1024), np.ones((8, 1024), np.float32), np.empty((8, 256), np.float32)
    ways = []
    for ahead in (0, TILE_AHEAD):
        set_facts(replace(usual, tile_ahead=ahead))
        task = task_for(x, weights[0], out, None, 1)
        task = replace(task, rows=task.rows.copy())
        task.rows[1, f.SEEN] = f.NEVER_SEEN
        ways.append(partial(_past_all, task, x, weights, out))
    not_asked, asked = times(ways, 5)
    return TILE_AHEAD if asked <= not_asked * _margin(usual.tile_ahead > 0) else 0


def _past_all(task: Task, x: Array, weights: Sequence[PackedWeight], out: Array) -> None:
    for w in weights:
        launch_single(task, x, w, out, None)


def _again(task: Task, x: Array, w: Array, out: Array) -> None:
    for _ in range(4):
        launch_single(task, x, w.T, out, None)


def _serial(usual: Facts) -> int:
    """Where all threads together begin to win; as usual where other programs take a part.

    Waking few threads costs little: where they do not win even by what outweighs it many times, a program that `_busy`
    did not see has a part, and these facts would outlast it. So of few threads no larger sizes are timed.
    """
    threads = get_num_threads()
    if threads == 1 or _busy(threads):
        return usual.serial
    sizes = [2**i for i in range(14, 18 + (threads - 1).bit_length())]
    least = dict.fromkeys(sizes, (float("inf"), float("inf")))
    for _ in range(SWEEPS):
        for size in sizes:
            w = _panels(np.ones(size, np.float32), size // 256, 256)[0]
            found = times([_product(1, w, replace(usual, serial=0), t) for t in (1, threads)], 5)
            least[size] = min(least[size][0], found[0]), min(least[size][1], found[1])
    won = [together <= alone * _margin(size >= usual.serial) for size, (alone, together) in least.items()]
    return _first_won(sizes, won)


def _first_won(sizes: Sequence[int], won: Sequence[bool]) -> int:
    """The size from which on all are won, and before which none is, but for as few as possible.

    What another program spoiled is one of those few; else the largest of what it spoiled would decide for good.
    """
    exceptions = [sum(won[:i]) + len(won[i:]) - sum(won[i:]) for i in range(len(sizes) + 1)]
    return [*sizes, 2 * sizes[-1]][exceptions.index(min(exceptions))]


def _busy(threads: int) -> bool:
    """Whether other programs want these CPUs: a thread that waits for one of them says nothing about this machine."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) - threads + 1.5


def _ridge(store: Array, usual: Facts) -> float:
    """Flops of a square product over bytes of one row's, on all threads, per second each."""
    threads, square = get_num_threads(), store[: 384 * 384].reshape(384, 384)
    rows = _panels(store, len(store) // 1024, 1024)[0]
    compute, memory = times([_product(384, square, usual, threads), _product(1, rows, usual, threads)])
    return (2 * 384**3 / compute) / (store.nbytes / memory)


facts.measurer = measure
