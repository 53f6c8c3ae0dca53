"""A study of nothing, and a machine whose time only moves when something works on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from isogemm.lab import SubmitClock, SyncClock, Work
from isogemm.study.declare import Figure, Study, StudyCase, Way, Ways
from isogemm.study.site import Site


class Queue:
    """A device: a launch takes the host `launch` seconds, and the device as long as its work."""

    def __init__(self, launch: float = 1e-5) -> None:
        self.launch, self.now, self.busy_until, self.worked = launch, 0.0, 0.0, 0.0

    def enqueue(self, seconds: float) -> None:
        self.now += self.launch
        self.busy_until = max(self.busy_until, self.now) + seconds
        self.worked += seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)

    @property
    def time(self) -> Any:
        """In place of the module `time`."""
        return SimpleNamespace(perf_counter=lambda: self.now, sleep=lambda seconds: None)


class WorkClock:
    """What the device's own events would say."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def elapsed(self, run: Any, first: int, calls: int) -> float:
        before = self.queue.worked
        for i in range(first, first + calls):
            run(i)
        self.queue.synchronize()
        return self.queue.worked - before

    def pause(self, seconds: float) -> None:
        """Nothing spins."""


def site(queue: Queue, memory: int = 1 << 30) -> Site:
    """The queue as a GPU without a profiler; its clocks read `isogemm.lab.clock.time`, which tests replace."""
    wait = queue.synchronize
    clocks = {"device": WorkClock(queue), "wall": SyncClock(wait), "submit": SubmitClock(wait)}
    return Site("cpu", "a queue", memory, 1 << 20, False, clocks, {}, wait)


def study(queue: Queue, *, seconds: float = 1e-4, sizes: tuple[int, ...] = (1, 2, 3), fails: Any = None) -> Study:
    """A loop of k launches against one launch of the same work, k in `sizes`; `fails(k)` may raise."""

    def make(k: int) -> Any:
        def made(site: Site, seed: int) -> Ways:
            if fails:
                fails(k)
            work = Work(1000 * k, 10 * k)
            ways = {
                "batch": Way([lambda i: queue.enqueue(k * seconds)], work, kernel="one"),
                "loop": Way([lambda i: queue.enqueue(seconds)] * k, work, kernel="many"),
            }
            bits = {"checked": 1, "differing": 0, "from_first": 0, "outputs": 1, "error": 0.0}
            return Ways(ways, lambda: dict.fromkeys(ways, bits))

        return made

    cases = [StudyCase(f"k={k}", {"k": k}, k << 20, make(k), ("device", "wall", "submit")) for k in sizes]
    figure = Figure("a finding", None, "a sentence", [{"k": 1}])
    return Study("fake", "Why?", lambda site, quick: cases, lambda rows: [figure])
