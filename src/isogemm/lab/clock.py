"""Clocks: how long a run of calls took. A device brings its own by implementing `Clock`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["WALL", "Clock", "Run", "WallClock"]

Run = Callable[[int], object]


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

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """Seconds of wall time; see `Clock.elapsed`."""
        indices = range(first, first + calls)
        collecting = gc.isenabled()
        gc.disable()
        try:
            start = time.perf_counter()
            for i in indices:
                run(i)
            return time.perf_counter() - start
        finally:
            if collecting:
                gc.enable()

    def pause(self, seconds: float) -> None:
        """Sleep; see `Clock.pause`."""
        time.sleep(seconds)


WALL = WallClock()
