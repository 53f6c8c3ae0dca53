"""Clocks: how long a run of calls took. A device brings its own by implementing `Clock`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Run = Callable[[int], object]


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold the garbage collector off: it takes time, and a CUDA graph that it destroys ends a capture under way."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Clock(Protocol):
    """What `interleave` needs to know about time.

    A GPU clock records an event on either side of the calls; a clock of submissions does not synchronize;
    a clock of subprocesses adds up what each call returned. All of them are this protocol.
    """

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """Seconds that ``run(first), ..., run(first + calls - 1)`` took together."""
        ...

    def pause(self, seconds: float) -> None:
        """Leave the machine alone for so many seconds."""
        ...


class WallClock:
    """Wall time on the host, with the garbage collector held off while the calls run.

    The loop around the calls costs about 0.05 microseconds a call and is part of the time.
    """

    now = staticmethod(time.perf_counter)

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """Seconds by `now`; see `Clock.elapsed`."""
        indices = range(first, first + calls)
        with uncollected():
            start = self.now()
            for i in indices:
                run(i)
            return self.now() - start

    def pause(self, seconds: float) -> None:
        """Sleep; see `Clock.pause`."""
        time.sleep(seconds)


class CpuClock(WallClock):
    """Time that the processors spent on this process, for one thread's calls on a machine that others use too."""

    now = staticmethod(time.process_time)


class SubmitClock:
    """Host time of enqueueing, from an empty queue; at most as many calls at once as surely fit into it."""

    MOST = 256  # a CUDA queue holds about 1024 launches before it blocks, and a call may make several

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """See `isogemm.lab.Clock`."""
        seconds = 0.0
        for start in range(first, first + calls, self.MOST):
            self._synchronize()
            begin = time.perf_counter()
            for i in range(start, min(start + self.MOST, first + calls)):
                run(i)
            seconds += time.perf_counter() - begin
        self._synchronize()
        return seconds

    def pause(self, seconds: float) -> None:
        """See `isogemm.lab.Clock`."""


class SyncClock:
    """Host time until the device has finished all calls."""

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """See `isogemm.lab.Clock`."""
        self._synchronize()
        begin = time.perf_counter()
        for i in range(first, first + calls):
            run(i)
        self._synchronize()
        return time.perf_counter() - begin

    def pause(self, seconds: float) -> None:
        """See `isogemm.lab.Clock`."""


WALL = WallClock()
