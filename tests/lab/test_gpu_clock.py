"""Device time by replays of graphs: what is captured, what is replayed, and which replays are timed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isogemm.lab import Candidate, interleave
from isogemm.lab.gpu import clock as clocks

UPLOAD, CALL = 1.0, 10.0  # microseconds of a call: more the first time that its graph is replayed


class Device:
    """A GPU that knows what time it is, and the part of torch that a clock sees."""

    def __init__(self) -> None:
        self.now, self.captured, self.graphs = 0.0, None, []
        self.cuda = SimpleNamespace(
            Stream=lambda device: None, graph_pool_handle=lambda: 0, synchronize=lambda device: None,
            device=lambda device: nullcontext(), stream=lambda stream: nullcontext(),
            CUDAGraph=lambda: Graph(self), Event=lambda enable_timing: Event(self),
            memory_reserved=lambda device: 0, memory_allocated=lambda device: 0,
            get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        )  # fmt: skip

    def run(self, i: int) -> None:
        if self.captured is None:
            self.now += CALL
        else:
            self.captured.append(i)


class Graph:
    def __init__(self, device: Device) -> None:
        self.device, self.calls, self.replays = device, list[int](), 0

    def capture_begin(self, **options: Any) -> None:
        self.device.captured = self.calls

    def capture_end(self) -> None:
        self.device.captured = None
        self.device.graphs.append(self)

    def replay(self) -> None:
        self.device.now += len(self.calls) * (CALL if self.replays else CALL + UPLOAD)
        self.replays += 1


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e-3 * (later.at - self.at)


@pytest.fixture
def device(monkeypatch) -> Device:
    made = Device()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def rotating(device: Device, period: int) -> Any:
    """Calls that rotate through so many sets of operands."""

    class Calls:
        def __call__(self, i: int) -> None:
            device.run(i)

    calls = Calls()
    calls.period = period
    return calls


def test_a_replay_that_brings_its_graph_to_the_device_is_not_timed(device) -> None:
    """It takes a microsecond more for every call, a tenth of a short product."""
    clock = clocks.GraphClock()
    assert clock.elapsed(device.run, 0, 5) == pytest.approx(5 * CALL * 1e-6)
    assert clock.elapsed(device.run, 5, 7) == pytest.approx(7 * CALL * 1e-6)


def test_each_candidate_takes_its_time_whatever_its_operands_number(device) -> None:
    candidates = [Candidate(str(period), rotating(device, period)) for period in (1, 3, 8, 64)]
    found = interleave(candidates, blocks=7, block_seconds=2e-3, pause=0, clock=clocks.GraphClock())
    for timing in found.values():
        assert timing.samples == pytest.approx([CALL * 1e-6] * 7)


@given(period=st.integers(1, 64), calls=st.lists(st.integers(1, 1000), min_size=1, max_size=5))
def test_a_graph_has_whole_turns_of_the_operands(period, calls) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Device()
        patch.setitem(sys.modules, "torch", device)
        clock, run, first = clocks.GraphClock(), rotating(device, period), 0
        for count in calls:
            assert clock.elapsed(run, first, count) == pytest.approx(count * CALL * 1e-6)
            first += count
        for graph in device.graphs:
            begin, length = graph.calls[0], len(graph.calls)
            assert graph.calls == list(range(begin, begin + length))
            assert length <= max(period, clocks.MOST_NODES)
            assert 0 <= begin < period > length or (begin == 0 and length % period == 0)
        assert len(device.graphs) == len({(graph.calls[0], len(graph.calls)) for graph in device.graphs})


def test_a_long_call_is_not_made_once_for_every_set_of_operands(device) -> None:
    clock, run = clocks.GraphClock(), rotating(device, 64)
    clock.elapsed(run, 7, 2)
    assert [graph.calls for graph in device.graphs] == [[7, 8]]
    assert device.now == pytest.approx(3 * CALL + 2 * UPLOAD + 2 * CALL)  # once outside, uploaded, and timed


def test_what_a_first_call_does_is_not_captured(device) -> None:
    made = []

    def run(i: int) -> None:
        if not made:
            assert device.captured is None
            made.append(i)
        device.run(i)

    clock = clocks.GraphClock()
    assert clock.elapsed(run, 0, 300) == pytest.approx(300 * CALL * 1e-6)
    assert device.graphs[0].replays == 1 + 300 // clocks.MOST_NODES
