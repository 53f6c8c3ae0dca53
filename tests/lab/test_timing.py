"""`interleave` on a clock that only moves when a candidate moves it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from isogemm.errors import LimitError, OptionError
from isogemm.lab import Candidate, CpuClock, QuietClock, Timing, WallClock, interleave
from isogemm.lab import clock as clocks
from isogemm.lab.timing import MAX_CALLS

PAUSE = WallClock.pause  # while tests run a clock does not rest


class FakeClock:
    """Time passes by `cost` a call, plus what switching candidates costs, and everything is logged."""

    def __init__(self, costs: dict[str, float], *, first: float = 0.0, switch: float = 0.0) -> None:
        self.costs, self.first, self.switch = costs, first, switch
        self.log: list[tuple[str, int, int]] = []
        self.pauses: list[float] = []
        self.last = ""

    def elapsed(self, run, first, calls):
        name = run(first)
        seconds = self.costs[name] * calls
        if first == 0:
            seconds += self.first
        if name != self.last:
            seconds += self.switch
        self.last = name
        self.log.append((name, first, calls))
        return seconds

    def pause(self, seconds):
        self.pauses.append(seconds)


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(name, lambda i, name=name: name) for name in names]


def test_times_are_per_call_and_blocks_are_long_enough():
    clock = FakeClock({"a": 1e-5, "b": 3e-3})
    timings = interleave(candidates("a", "b"), blocks=5, block_seconds=0.02, clock=clock)
    assert list(timings) == ["a", "b"]
    assert timings["a"].median == pytest.approx(1e-5)
    assert timings["b"].median == pytest.approx(3e-3)
    assert (timings["a"].calls, timings["b"].calls) == (2000, 7)
    assert len(timings["a"].samples) == len(timings["b"].samples) == 5


def test_neither_compilation_nor_the_switch_between_candidates_is_timed():
    clock = FakeClock({"a": 1e-4, "b": 1e-4}, first=30.0, switch=0.5)
    timings = interleave(candidates("a", "b"), blocks=4, clock=clock)
    for timing in timings.values():
        assert timing.samples == pytest.approx([1e-4] * 4)


def test_every_index_is_used_once_so_that_operands_rotate():
    clock = FakeClock({"a": 1e-3, "b": 2e-3})
    interleave(candidates("a", "b"), blocks=3, clock=clock)
    for name in "ab":
        expected = 0
        for _, first, calls in (entry for entry in clock.log if entry[0] == name):
            assert first == expected
            expected += calls


def test_rounds_interleave_and_their_order_changes():
    names = ("a", "b", "c")
    clock = FakeClock(dict.fromkeys(names, 10.0))  # one call fills a block, and is not warmed up
    interleave(candidates(*names), blocks=6, block_seconds=0.5, clock=clock)
    order = [name for name, _, _ in clock.log][3 * len(names) :]  # after one call to compile and two to calibrate
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["abc", "bca", "cab", "cba", "acb", "bac"]


def test_long_calls_are_not_warmed_up_again_and_short_ones_are():
    clock = FakeClock({"long": 1.0, "short": 0.001})
    interleave(candidates("long", "short"), blocks=2, block_seconds=0.02, clock=clock)
    assert [calls for name, _, calls in clock.log if name == "long"] == [1, 1, 1, 1, 1]
    assert [calls for name, _, calls in clock.log if name == "short"][-4:] == [5, 20, 5, 20]


@pytest.mark.parametrize("interrupted", range(1, 8))
def test_an_interruption_while_calibrating_does_not_shorten_the_blocks(interrupted):
    class Interrupted(FakeClock):
        def elapsed(self, run, first, calls):
            stray = 0.016 if len(self.log) == interrupted else 0.0
            return super().elapsed(run, first, calls) + stray

    clock = Interrupted({"a": 1e-5})
    assert interleave(candidates("a"), blocks=1, block_seconds=0.02, clock=clock)["a"].calls == 2000


def test_what_is_known_of_a_long_call_is_not_measured_again():
    clock = FakeClock({"long": 1.0, "short": 1e-4})
    known = [Candidate("long", lambda i: "long", seconds=1.0), Candidate("short", lambda i: "short", seconds=1e-4)]
    interleave(known, blocks=2, block_seconds=0.02, clock=clock)
    assert [calls for name, _, calls in clock.log if name == "long"] == [1, 1]
    assert [calls for name, _, calls in clock.log if name == "short"][-4:] == [50, 200, 50, 200]


@pytest.mark.parametrize(("most", "expected"), [(1, [1, 1, 1]), (16, [16] * 6)])
def test_a_block_has_no_more_calls_than_it_may(most, expected):
    clock = FakeClock({"a": 1e-5})
    found = interleave([Candidate("a", lambda i: "a", most=most)], blocks=3, block_seconds=0.02, clock=clock)
    assert max(calls for _, _, calls in clock.log) == most
    assert [calls for _, _, calls in clock.log][-len(expected) :] == expected
    assert found["a"].median == pytest.approx(1e-5)


def test_every_block_follows_a_pause():
    clock = FakeClock({"a": 1e-2, "b": 1e-2})
    interleave(candidates("a", "b"), blocks=3, pause=0.04, clock=clock)
    assert clock.pauses == [0.04] * (2 + 2 * 3)


def test_progress_reaches_its_total():
    seen = []
    interleave(
        candidates("a", "b"),
        blocks=3,
        clock=FakeClock({"a": 1e-2, "b": 1e-2}),
        progress=lambda done, total, name: seen.append((done, total, name)),
    )
    assert [done for done, _, _ in seen] == list(range(1, 9))
    assert {total for _, total, _ in seen} == {8}
    assert seen[:2] == [(1, 8, "a"), (2, 8, "b")]


def test_a_candidate_that_takes_no_time_is_refused_not_looped_on_forever():
    clock = FakeClock({"a": 0.0})
    with pytest.raises(LimitError, match="measurable"):
        interleave(candidates("a"), clock=clock)
    assert max(calls for _, _, calls in clock.log) <= MAX_CALLS


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ((), {}),
        (("a", "a"), {}),
        (("a",), {"blocks": 0}),
        (("a",), {"block_seconds": 0.0}),
        (("a",), {"block_seconds": float("nan")}),
        (("a",), {"pause": -1.0}),
    ],
)
def test_bad_options_are_typed_errors_and_nothing_runs(names, options):
    clock = FakeClock({"a": 1.0})
    with pytest.raises(OptionError):
        interleave(candidates(*names), clock=clock, **options)
    assert clock.log == []


def test_a_failing_candidate_is_the_callers_to_handle():
    def fail(i):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave([Candidate("a", fail)], pause=0)


def test_the_wall_clock_holds_the_collector_off_and_lets_it_go_again():
    import gc

    seen = []

    def run(i):
        seen.append((i, gc.isenabled()))
        if i == 7:
            raise ValueError("stop")

    clock = WallClock()
    assert gc.isenabled()
    assert clock.elapsed(run, 3, 2) > 0
    assert seen == [(3, False), (4, False)]
    with pytest.raises(ValueError, match="stop"):
        clock.elapsed(run, 7, 1)
    assert gc.isenabled()


def test_a_clock_of_the_processors_leaves_out_what_others_took(monkeypatch):
    """Of two seconds that passed, one was this process's."""
    now = [0.0, 0.0]
    monkeypatch.setattr(WallClock, "now", lambda self: now[0])
    monkeypatch.setattr(CpuClock, "now", lambda self: now[1])

    def run(i):
        now[0] += 2.0
        now[1] += 1.0

    assert (WallClock().elapsed(run, 0, 3), CpuClock().elapsed(run, 0, 3)) == (6.0, 3.0)
    monkeypatch.undo()
    assert CpuClock.now is time.process_time


@pytest.mark.parametrize(
    ("works", "asked", "slept"),
    [(0.0, 0.03, 0.035), (0.105, 0.03, 0.11), (0.105, 0.2, 0.205), (math.inf, 0.03, 0.53), (math.inf, 0, 0.0)],
)
def test_a_pause_lasts_until_threads_of_the_process_rest(monkeypatch, works, asked, slept):
    """A thread works for so many seconds from the beginning of a pause on."""
    now = [0.0]
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(clocks, "time", SimpleNamespace(sleep=sleep, process_time=lambda: min(now[0], works)))
    PAUSE(WallClock(), asked)
    assert now[0] == pytest.approx(slept)


def test_a_run_that_was_held_up_is_taken_again_by_the_calls_that_come_next(monkeypatch):
    """Each of four calls waits for a CPU so long; a fifth call, between attempts, finds its caches again."""
    now, waited, seen = [0.0], [0.0], []
    held = dict.fromkeys(range(5, 9), 0.5) | dict.fromkeys(range(10, 14), 0.125)
    monkeypatch.setattr(WallClock, "now", lambda self: now[0])
    monkeypatch.setattr(WallClock, "pause", lambda self, seconds: seen.append(None))
    monkeypatch.setattr(clocks, "_waited", lambda: waited[0])
    monkeypatch.setattr(QuietClock, "SECONDS", 1000.0)

    def run(i):
        seen.append(i)
        now[0] += 1.0 + held.get(i, 0.0)
        waited[0] += held.get(i, 0.0)

    quiet = QuietClock()
    assert quiet.elapsed(run, 5, 4) == 4.0
    assert seen == [5, 6, 7, 8, None, 9, 10, 11, 12, 13, None, 14, 15, 16, 17, 18]
    assert quiet.held_up == [False]
    held = dict.fromkeys(range(1000), 0.5)
    del seen[:]
    assert quiet.elapsed(run, 0, 4) == 6.0  # never quiet
    assert len(seen) == 6 * QuietClock.MOST
    monkeypatch.setattr(QuietClock, "SECONDS", 10.0)
    del seen[:]
    assert quiet.elapsed(run, 0, 4) == 6.0
    assert len(seen) == 4 + 2 + 4
    assert quiet.held_up == [False, True, True]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux counts how long threads wait")
def test_threads_that_share_a_cpu_have_waited():
    before, end = clocks._waited(), time.perf_counter() + 10
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while clocks._waited() - before < 0.01:
            assert time.perf_counter() < end
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cpus)


def test_summary_of_samples():
    timing = Timing.of("a", [float(i) for i in range(1, 102)], 4)
    assert (timing.p5, timing.median, timing.p95) == (6.0, 51.0, 96.0)
    double = timing.scaled(2.0, "b")
    assert (double.name, double.median, double.p95, double.calls) == ("b", 102.0, 192.0, 4)


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0], [float("nan")], [float("inf")]])
def test_impossible_samples_are_refused(samples):
    with pytest.raises(OptionError):
        Timing.of("a", samples, 1)
