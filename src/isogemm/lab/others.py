"""What other programs did while something was measured."""

from __future__ import annotations

import os
import time

__all__ = ["Others"]

SHORTEST = 1.0  # seconds: CPU time is counted in steps of 10 ms
NO_WORK = ("idle", "iowait", "guest", "guest_nice")  # guests' time is in the others', too


class Others:
    """CPUs that other programs keep busy, of those that this process may use.

    Work of this process and of its children that have ended is its own; what a hypervisor takes away is not.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    def mean(self) -> float | None:
        """How many in the mean since this was made; None where that is less than a second ago."""
        seconds, all_work, own = (now - begin for now, begin in zip(self._now(), self._begin, strict=True))
        return round(max(0.0, all_work - own) / seconds, 2) if seconds >= SHORTEST else None

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: on the clock, of work of all programs on these CPUs, of our own."""
        import psutil

        process = psutil.Process()
        every = dict(enumerate(psutil.cpu_times(percpu=True)))
        mine = set(process.cpu_affinity()) & set(every) if hasattr(process, "cpu_affinity") else set(every)
        work = sum(sum(every[i]) - sum(getattr(every[i], name, 0.0) for name in NO_WORK) for i in mine)
        return time.monotonic(), work, sum(os.times()[:4])
