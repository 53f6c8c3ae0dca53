"""Clocks: how long a run of calls took. A device brings its own by implementing `Clock`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..base.collector import uncollected

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
        """Leave the machine alone for so many seconds, and until nothing of what was timed works any more."""
        ...


class WallClock:
    """Wall time on the host, with the garbage collector held off while the calls run.

    The loop around the calls costs about 0.05 microseconds a call and is part of the time.
    """

    LOOK, RESTING, LOOKS = 0.005, 0.2, 100  # seconds; of them that threads which rest may work; looks at most

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
        """Sleep, and go on while threads of this process work, for half a second at most.

        OpenBLAS's spin for 2**28 ticks of the time stamp counter behind a call: 105 ms where that counts 2.6 GHz. Two
        threads of another library beside one that spins take up to twice as long.
        """
        time.sleep(seconds)
        for _ in range(self.LOOKS if seconds else 0):
            before = time.process_time()
            time.sleep(self.LOOK)
            if time.process_time() - before < self.RESTING * self.LOOK:
                return


class CpuClock(WallClock):
    """Time that the processors spent on this process, for one thread's calls on a machine that others use too."""

    now = staticmethod(time.process_time)


class QuietClock(WallClock):
    """Wall time of runs in which no thread of this process waited for a CPU that another program had.

    For several threads on a machine that others use too: a run that was held up is taken again, by the calls that come
    next, and the one that was held up least counts. A process that has slept comes before those that have not, for some
    milliseconds, hence a pause before each and short runs; a quarter of its calls find their caches and threads again.
    Linux says how long threads have waited.

    Attributes
    ----------
    held_up : list of bool
        Of each run, whether no attempt of it was quiet.
    """

    SHARE, MOST, SECONDS, PAUSE = 0.02, 25, 2.0, 0.03  # that threads may wait; attempts; none begins after; before each

    def __init__(self) -> None:
        self.held_up: list[bool] = []

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """Seconds of the quietest attempt; see `Clock.elapsed`."""
        least, spent, again = (float("inf"), 0.0), 0.0, -(-calls // 4)
        for _ in range(self.MOST):
            before = _waited()
            seconds = super().elapsed(run, first, calls)
            least, spent = min(least, ((_waited() - before) / seconds, seconds)), spent + seconds
            if least[0] <= self.SHARE or spent > self.SECONDS:
                break
            self.pause(self.PAUSE)
            super().elapsed(run, first + calls, again)
            first += calls + again
        self.held_up.append(least[0] > self.SHARE)
        return least[1]


def _waited() -> float:
    """Seconds that this process's threads have been ready without a CPU, all of them together."""
    waited = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has just ended
            waited += int((thread / "schedstat").read_text().split()[1])
    return waited * 1e-9


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
        """Nothing: waiting for the device is a pause."""


class SubmitClock(SyncClock):
    """Host time of enqueueing, from an empty queue; at most as many calls at once as surely fit into it."""

    MOST = 256  # a CUDA queue holds about 1024 launches before it blocks, and a call may make several

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


WALL = WallClock()
