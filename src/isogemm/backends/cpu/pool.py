"""Threads that take chunks of a task array.

Numba's own layers do not fit a library that others call from threads and fork: ``workqueue`` aborts on concurrent
calls, ``omp`` kills forked children and needs a system libgomp, ``tbb`` is absent on most machines. Here workers are
Python daemon threads inside compiled code without the GIL. They spin briefly between calls, then sleep on a lock.
Chunks are claimed from one atomic word, so a late worker costs speed, not correctness; which thread computes a chunk
never reaches the bits. A second caller, finding the pool busy, computes all its chunks itself.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...floating import enter_default_rounding, leave_default_rounding
from ...jit import njit
from ...threads import join_threadpoolctl
from .atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap,
    pause,
)
from .routines import call3
from .scalars import poke64

__all__ = ["Pool", "pool", "run_chunks"]

# Control words, a cache line apart where threads write them.
TICKET, FINISHED, FUNCTION, TASKS, SCRATCH, STRIDE, JOBS, SLEEPING = 0, 8, 16, 17, 18, 19, 20, 24
WORDS = 24 + 8 * 1024
INDEX_BITS, COUNT_BITS = 20, 20
MASK = (1 << INDEX_BITS) - 1
MAX_THREADS = 1023
MAX_CHUNKS = MASK - MAX_THREADS - 1
# Some tenths of a millisecond: longer than the gap between the layers of a forward pass, and soon over.
SPINS = 20000
ALIGN = 64
TASK_BYTES = 1024  # before the first thread's scratch: room for the task array of a single product
# Words of a task array's header; items and items per chunk come first. With STEPS, one descriptor serves all items.
JOB, STEPS, STEP_A, STEP_B, STEP_OUT, STEP_C = 2, 3, 4, 5, 6, 7


@njit
def _work(control, slot):
    """Claim and run chunks until none is left. A claimed word names its own chunk count: a stale claim is inert."""
    while True:
        word = atomic_load(control + TICKET * 8)
        if (word & MASK) >= ((word >> INDEX_BITS) & MASK):
            return
        word = atomic_add(control + TICKET * 8, 1)
        chunk = word & MASK
        if chunk >= ((word >> INDEX_BITS) & MASK):
            return
        # The task cannot end before this chunk is counted, so its words are stable here.
        scratch = atomic_load(control + SCRATCH * 8) + slot * atomic_load(control + STRIDE * 8)
        call3(atomic_load(control + FUNCTION * 8), atomic_load(control + TASKS * 8), chunk, scratch)
        atomic_add(control + FINISHED * 8, 1)


@njit
def _has_work(control):
    word = atomic_load(control + TICKET * 8)
    return (word & MASK) < ((word >> INDEX_BITS) & MASK)


@njit
def _serve(control, slot, spins):
    """A worker: take work while there is any, spin a while, then mark itself asleep and return.

    A task may be published between the last look and the mark: look once more behind it. Whoever takes the mark away
    decides: the worker goes on, or the publisher has released its lock.
    """
    saved = enter_default_rounding()
    asleep = control + (SLEEPING + 8 * slot) * 8
    idle = 0
    while True:
        if _has_work(control):
            _work(control, slot)
            idle = 0
        elif idle < spins:
            pause()
            idle += 1
        else:
            atomic_swap(asleep, 1)
            if not _has_work(control) or atomic_swap(asleep, 0) == 0:
                break
            idle = 0
    leave_default_rounding(saved)


@njit
def _publish(control, function, tasks, chunks, scratch, stride, threads):
    """Make a task visible; whether one of its workers sleeps."""
    atomic_store(control + FINISHED * 8, 0)
    atomic_store(control + FUNCTION * 8, function)
    atomic_store(control + TASKS * 8, tasks)
    atomic_store(control + SCRATCH * 8, scratch)
    atomic_store(control + STRIDE * 8, stride)
    generation = (atomic_load(control + TICKET * 8) >> (INDEX_BITS + COUNT_BITS)) + 1
    word = ((generation & 0x3FFFFF) << (INDEX_BITS + COUNT_BITS)) | (chunks << INDEX_BITS)
    atomic_swap(control + TICKET * 8, word)
    asleep = 0
    for slot in range(1, threads):
        asleep |= atomic_load(control + (SLEEPING + 8 * slot) * 8)
    return asleep


@njit
def take_part(control, chunks):
    """Work on the published task, and wait for its last chunk."""
    saved = enter_default_rounding()
    _work(control, 0)
    while atomic_load(control + FINISHED * 8) < chunks:
        pause()
    leave_default_rounding(saved)


@njit
def run_chunks(control, threads, function, tasks, chunks, scratch, stride):
    """Every chunk of a task array: on the pool when `threads` > 1, else on the calling thread.

    Returns 1 when workers have to be woken first, for which Python is needed: then wake them and call `take_part`.
    The task is numbered, so that a thread's scratch can tell whether what it holds belongs to this task.
    """
    poke64(tasks + JOB * 8, atomic_add(control + JOBS * 8, 1))
    if threads > 1:
        if _publish(control, function, tasks, chunks, scratch, stride, threads) != 0:
            return 1
        take_part(control, chunks)
        return 0
    saved = enter_default_rounding()
    for chunk in range(chunks):
        call3(function, tasks, chunk, scratch)
    leave_default_rounding(saved)
    return 0


@njit
def _claim_sleeper(control, slot):
    return atomic_swap(control + (SLEEPING + 8 * slot) * 8, 0)


class Pool:
    """Worker threads, their control words, and scratch memory that lives between calls."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._control: NDArray[np.int64] = np.zeros(WORDS + ALIGN // 8, np.int64)
        address = self._control.ctypes.data
        self._words = -(-address // ALIGN) * ALIGN
        self._control[(self._words - address) // 8 + JOBS] = 1
        self._wake: list[Any] = [None]
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._base = self._room = 0

    def enter(self, scratch: int, threads: int) -> tuple[int, int, int, int, Any]:
        """(control, threads, scratch address, scratch stride, held) for `run_chunks`; give `held` back to `leave`.

        `threads` becomes 1 when the pool is busy: the caller runs all chunks itself.
        """
        if not self._busy.acquire(False):
            own = np.zeros(scratch + ALIGN + TASK_BYTES, np.uint8)
            return self._words, 1, -(-own.ctypes.data // ALIGN) * ALIGN + TASK_BYTES, scratch, own
        threads = min(threads, MAX_THREADS)
        while len(self._wake) < threads:
            self._start(len(self._wake))
        # A worker of an earlier, larger call may still be awake and help: it needs scratch too.
        stride = (scratch | 4095) + 65  # an odd line: threads' buffers fall in different cache sets
        room = stride * len(self._wake)
        if self._room < room:
            self._scratch = np.zeros(
                room + ALIGN + TASK_BYTES, np.uint8
            )  # zeros: task 0 never runs, so no stale tag fits
            self._room = room
            self._base = -(-self._scratch.ctypes.data // ALIGN) * ALIGN + TASK_BYTES
        return self._words, threads, self._base, stride, None

    def leave(self, held: Any) -> None:
        """End of a call: the next one may have the pool."""
        if held is None:
            self._busy.release()

    def finish(self, threads: int, chunks: int) -> None:
        """After `run_chunks` said so: wake the task's workers and take part. Surplus workers stay asleep."""
        for slot in range(1, threads):
            if _claim_sleeper(self._words, slot):
                self._wake[slot].release()
        take_part(self._words, chunks)

    def _start(self, slot: int) -> None:
        join_threadpoolctl()
        lock = threading.Lock()
        lock.acquire()
        self._wake.append(lock)
        words = self._words

        def serve() -> None:
            while True:
                _serve(words, slot, SPINS)
                lock.acquire()

        threading.Thread(target=serve, name=f"isogemm-{slot}", daemon=True).start()


_pool = Pool()


def pool() -> Pool:
    """The process's pool. A forked child has none of its parent's threads and gets a new one."""
    return _pool


def _after_fork() -> None:
    global _pool
    _pool = Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
