"""Threads that take chunks of a task array.

Numba's own layers do not fit a library that others call from threads and fork: ``workqueue`` aborts on concurrent
calls, ``omp`` kills forked children and needs a system libgomp, ``tbb`` is absent on most machines. Here workers are
Python daemon threads that stay inside compiled code without the GIL. They spin briefly between calls, then sleep on a
lock. The first chunk is the caller's, others are claimed from one atomic word, so a late worker costs speed, not
correctness; which thread computes a chunk never reaches the bits. A second caller, finding the pool busy, computes
all its chunks itself.

A signal handler, a tracing hook or another thread may raise an exception in a caller between any two steps of Python.
So none lie between taking the pool and giving it back: one compiled call takes it, publishes the task, wakes workers,
takes part, waits for the last chunk and gives the pool back. An exception finds a call that has not begun or has ended.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ...base.floating import enter_default_rounding, leave_default_rounding
from ...base.jit import njit
from ...base.threads import get_num_threads, join_threadpoolctl
from .emit.atomics import (
    atomic_add,
    atomic_exchange_if,
    atomic_load,
    atomic_store,
    atomic_swap,
    lock_made,
    lock_released,
    lock_taken,
    pause,
)
from .emit.entries import call
from .emit.scalars import poke64

# Control words, a cache line apart where threads write them. Of a worker's own line the second word is its lock.
TICKET, FINISHED, FUNCTION, TASKS, SCRATCH, STRIDE = 0, 8, 16, 17, 18, 19
JOBS, BUSY, HIRED, WANTED, SLEEPING = 24, 32, 40, 41, 48
MAX_THREADS = 1023
WORDS = SLEEPING + 8 * (MAX_THREADS + 1)
# The ticket: the next chunk, how many there are, and how many threads may take some.
INDEX_BITS, COUNT_BITS = 20, 20
MASK = (1 << INDEX_BITS) - 1
MAX_CHUNKS = MASK
# Some tenths of a millisecond: longer than the gap between the layers of a forward pass, and soon over.
SPINS = 20000
ALIGN = 64
TASK_BYTES = 1024  # before the first thread's scratch: room for the task array of a single product
# Words of a task array's header; items and items per chunk come first. With STEPS, one descriptor serves all items.
JOB, STEPS, STEP_A, STEP_B, STEP_OUT, STEP_C = 2, 3, 4, 5, 6, 7


@njit
def _has_work(word, slot):
    return (word & MASK) < ((word >> INDEX_BITS) & MASK) and slot < (word >> (INDEX_BITS + COUNT_BITS))


@njit
def _work(control, slot):
    """Claim and run chunks until none is left for this thread: surplus threads have no scratch."""
    while True:
        word = atomic_load(control + TICKET * 8)
        if not _has_work(word, slot):
            return
        if not atomic_exchange_if(control + TICKET * 8, word, word + 1):
            continue
        # The task cannot end before this chunk is counted, so its words are stable here.
        scratch = atomic_load(control + SCRATCH * 8) + slot * atomic_load(control + STRIDE * 8)
        call(atomic_load(control + FUNCTION * 8), atomic_load(control + TASKS * 8), word & MASK, scratch)
        atomic_add(control + FINISHED * 8, 1)


@njit
def _join(control):
    """Slot of a new worker; 0 if there are as many as are wanted."""
    lock = lock_made()
    if lock == 0:
        return 0
    lock_taken(lock)
    while True:
        hired = atomic_load(control + HIRED * 8)
        if hired >= atomic_load(control + WANTED * 8):
            return 0
        # The lock has to be in its place before anyone can find the worker asleep.
        if atomic_exchange_if(control + HIRED * 8, hired, hired + 1):
            atomic_store(control + (SLEEPING + 8 * (hired + 1) + 1) * 8, lock)
            return hired + 1


@njit
def _serve(control, slot, spins):
    """A worker: take work while there is any, spin a while, then mark itself asleep and sleep; never returns.

    A task may be published between the last look and the mark: look once more behind it. Whoever takes the mark away
    decides: the worker goes on, or the publisher releases its lock.
    """
    enter_default_rounding()
    asleep = control + (SLEEPING + 8 * slot) * 8
    idle = 0
    while True:
        if _has_work(atomic_load(control + TICKET * 8), slot):
            _work(control, slot)
            idle = 0
        elif idle < spins:
            pause()
            idle += 1
        else:
            atomic_swap(asleep, 1)
            if not _has_work(atomic_load(control + TICKET * 8), slot) or atomic_swap(asleep, 0) == 0:
                lock_taken(atomic_load(asleep + 8))
            idle = 0


@njit
def _publish(control, threads, scratch, stride, function, tasks, chunks):
    """Make a task visible to workers, and wake those of its workers that sleep; surplus ones stay asleep.

    The first chunk is the publisher's. Two threads so have the same halves of the same weights in call after call,
    each in its own cache.
    """
    atomic_store(control + FINISHED * 8, 0)
    atomic_store(control + FUNCTION * 8, function)
    atomic_store(control + TASKS * 8, tasks)
    atomic_store(control + SCRATCH * 8, scratch)
    atomic_store(control + STRIDE * 8, stride)
    atomic_swap(control + TICKET * 8, (threads << (INDEX_BITS + COUNT_BITS)) | (chunks << INDEX_BITS) | 1)
    for slot in range(1, threads):
        asleep = control + (SLEEPING + 8 * slot) * 8
        if atomic_load(asleep) != 0 and atomic_swap(asleep, 0) != 0:
            lock_released(atomic_load(asleep + 8))


@njit
def take(control, threads):
    """Whether the pool, its scratch too, is this call's until `give`; with 0 threads the call has room of its own."""
    return threads == 0 or atomic_swap(control + BUSY * 8, 1) == 0


@njit
def give(control, threads):
    """End of what `take` began."""
    if threads > 0:
        atomic_store(control + BUSY * 8, 0)


@njit
def run_part(control, threads, scratch, stride, function, tasks, chunks):
    """Every chunk of a task array, between `take` and `give`: on `threads` threads, or on the calling one.

    The task is numbered, so that a thread's scratch can tell whether what it holds belongs to this task.
    """
    poke64(tasks + JOB * 8, atomic_add(control + JOBS * 8, 1))
    saved = enter_default_rounding()
    if threads > 1:
        _publish(control, threads, scratch, stride, function, tasks, chunks)
        call(function, tasks, 0, scratch)
        atomic_add(control + FINISHED * 8, 1)
        _work(control, 0)
        while atomic_load(control + FINISHED * 8) < chunks:
            pause()
    else:
        for chunk in range(chunks):
            call(function, tasks, chunk, scratch)
    leave_default_rounding(saved)


@njit
def run_chunks(control, threads, scratch, stride, function, tasks, chunks):
    """Every chunk of a task array; or nothing, and 1, if the pool is busy. For `Pool.run`."""
    if not take(control, threads):
        return 1
    run_part(control, threads, scratch, stride, function, tasks, chunks)
    give(control, threads)
    return 0


class Pool:
    """Worker threads, their control words, and scratch memory that lives between calls."""

    def __init__(self) -> None:
        room = np.zeros(WORDS + ALIGN // 8, np.int64)
        first = -room.ctypes.data % ALIGN // 8
        self._control: NDArray[np.int64] = room[first : first + WORDS]
        self._control[JOBS] = 1
        self.words = int(self._control.ctypes.data)
        self.threads = 1  # that are known to be there, the calling one included
        self.memory: tuple[int, int, NDArray[np.uint8]] = 0, 0, np.empty(0, np.uint8)

    def run(self, kernel: Any, scratch: int, threads: int, *arguments: Any) -> Any:
        """``kernel(control, threads, scratch address, scratch stride, *arguments)`` with `scratch` bytes per thread.

        It must take and give back the pool as `run_chunks` does. When it is another's, and the kernel returns 1, it is
        called again with 0 threads and memory of its own: the caller runs all chunks itself. Returns what it returned.
        """
        if threads > self.threads:
            threads = min(threads, MAX_THREADS)
            self._hire(threads)
        stride = stride_of(scratch)
        # Calls that are under way keep the memory they began with, which others may have replaced, in this frame.
        memory = self.memory
        if memory[0] < stride * threads:
            memory = self.memory = _room(stride * threads)
        found = kernel(self.words, threads, memory[1], stride, *arguments)
        if found == 1:
            memory = _room(stride)
            found = kernel(self.words, 0, memory[1], stride, *arguments)
        return found

    def _hire(self, threads: int) -> None:
        """See to it that `threads` threads, the calling one included, are there or on their way."""
        control = self._control
        control[WANTED] = max(control[WANTED], threads - 1)
        missing = threads - 1 - int(control[HIRED])
        if missing > 0:
            join_threadpoolctl()
            for kernel, words in ((_join, 1), (_serve, 3)):
                kernel.compile((types.int64,) * words)  # here, once, not in every worker
        # An interpreter that ends, or a system out of threads, has no more: then there are fewer, for the same bits.
        with contextlib.suppress(RuntimeError):
            for _ in range(missing):
                # A `threading.Thread` is two threads' business, and left half made by an exception in its `start`.
                _thread.start_new_thread(_worker, (control, self.words))
        self.threads = 1 + int(control[HIRED])


def stride_of(scratch: int) -> int:
    """Bytes from one thread's scratch to the next one's: an odd number of lines, for different cache sets.

    It is its own stride.
    """
    return (scratch - 65 | 4095) + 65


def _room(size: int) -> tuple[int, int, NDArray[np.uint8]]:
    """(size, address of the first thread's scratch, memory): zeros, and task 0 never runs, so no stale tag fits."""
    memory = np.zeros(size + ALIGN + TASK_BYTES, np.uint8)
    return size, -(-memory.ctypes.data // ALIGN) * ALIGN + TASK_BYTES, memory


def _worker(control: NDArray[np.int64], words: int) -> None:
    """A worker thread, which holds the control words for as long as it lives. Surplus ones end here."""
    slot = _join(words)
    if slot:
        threading.current_thread().name = f"isogemm-{slot}"
        _serve(words, slot, SPINS)


current = Pool()


def pool() -> Pool:
    """The process's pool. A forked child has none of its parent's threads and gets a new one."""
    return current


def run_task(entry: int, task: NDArray[np.int64], chunks: int, scratch: int, threads: int | None = None) -> None:
    """Every chunk of a task array by the entry at an address, on `threads` threads at most, or on the process's."""
    wanted = min(get_num_threads() if threads is None else threads, chunks)
    pool().run(run_chunks, scratch, wanted, entry, task.ctypes.data, chunks)


def _after_fork() -> None:
    global current
    current = Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
