"""Work that nobody waits for: a few daemon threads of low priority, there while there is something to do.

At the interpreter's end what waits is dropped and what runs is waited for: a compiler or a driver that is torn down
under a running call ends the process badly. A forked child has none of its parent's work.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable

from .threads import available

__all__ = ["busy", "ending", "submit", "wait"]

Task = Callable[[], None]
log = logging.getLogger("isogemm")
NICE = 10  # of these threads, where the system knows priorities of threads


class _Crew:
    """Tasks by their rank, and the threads that work them off."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.waiting: list[tuple[int, int, Task]] = []
        self.threads: set[threading.Thread] = set()
        self.left = 0
        self.numbers = itertools.count()
        self.over = False

    def submit(self, task: Task, rank: int) -> None:
        with self.lock:
            if self.over:
                return
            heapq.heappush(self.waiting, (rank, next(self.numbers), task))
            self.left += 1
            if len(self.threads) < _most():
                thread = threading.Thread(target=self._work, name="isogemm background", daemon=True)
                with contextlib.suppress(RuntimeError):  # out of threads: the next submission tries again
                    thread.start()
                    self.threads.add(thread)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # Linux: of this thread alone
        while task := self._next():
            try:
                task()
            except Exception:
                log.exception("a task in the background failed")
            with self.lock:
                self.left -= 1
                if not self.left:
                    self.idle.notify_all()

    def _next(self) -> Task | None:
        with self.lock:
            if self.waiting:
                return heapq.heappop(self.waiting)[-1]
            self.threads.discard(threading.current_thread())  # with the lock: the next task starts another thread
            return None

    def stop(self) -> None:
        with self.lock:
            self.left -= len(self.waiting)
            self.over, self.waiting = True, []
            running = list(self.threads)
        for thread in running:
            thread.join()


def _most() -> int:
    """Threads: compilers take a core each, and most cores are the caller's."""
    return max(1, min(8, available() // 2))


_crew = _Crew()


def submit(task: Task, rank: int = 0) -> None:
    """Do something later, in another thread; what has a lower rank first. What it raises is logged."""
    _crew.submit(task, rank)


def busy() -> bool:
    """Whether anything is being done, or waits to be."""
    return _crew.left > 0


def wait(seconds: float) -> bool:
    """Wait until nothing is; False where that takes longer than `seconds`."""
    with _crew.lock:
        return _crew.idle.wait_for(lambda: not _crew.left, seconds)


def ending() -> bool:
    """Whether this is a thread of ours, and the process ends: long work is not begun any more."""
    return _crew.over and threading.current_thread() in _crew.threads


def _anew() -> None:
    global _crew
    _crew = _Crew()


atexit.register(lambda: _crew.stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_anew)
