"""What a round of timed kernels counts as, whatever the device says of it."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from itertools import pairwise
from threading import Barrier, Thread
from threading import Event as Signal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.fakes import linear

from isogemm.backends.cuda.gemm import live
from isogemm.problem.product import Addresses, Product, Strides

PAUSE = 1.02  # milliseconds


class Event:
    """One that came to pass at a time."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


@pytest.mark.parametrize(("valid", "counted"), [(True, PAUSE + 20.5), (False, PAUSE)])
def test_where_the_device_waited_for_the_host_a_round_counts_its_pause(monkeypatch, valid, counted) -> None:
    monkeypatch.setattr(live, "relaxed", nullcontext)
    pairs = [[Event(1.0), Event(1.25)], [Event(21.0), Event(21.5)]]
    assert live.CudaRound(pairs, 1, PAUSE, valid).whole() == pytest.approx(counted)


def test_the_time_is_that_of_one_of_the_launches_in_a_row(monkeypatch) -> None:
    monkeypatch.setattr(live, "relaxed", nullcontext)
    pairs = [[Event(1.0), Event(1.03)], [Event(2.0), Event(2.06)]]
    assert live.CudaRound(pairs, 3, PAUSE, True).microseconds() == pytest.approx([10.0, 20.0])


ROOM, CACHE, PLACES = 2**40, 2**23, 12
SIDES = st.sampled_from([1, 3, 64, 1000, 4096])


@given(
    m=SIDES, n=SIDES, k=SIDES, batch=st.sampled_from([1, 3]), shared=st.booleans(), offset=st.sampled_from([0, 2, 16])
)
def test_other_places_lie_in_the_memory_that_there_is_and_as_the_caller_s(m, n, k, batch, shared, offset) -> None:
    """What is not in the cache first; as many as there is room for."""
    a, b = Strides(k, 1, 0 if shared else m * k), Strides(1, k, n * k)
    product = linear(m, n, k, a=a, b=b, batch=batch)
    at = Addresses(1024 + offset, 2048 + offset, 4096)
    sizes = 2 * (m * k if shared else batch * m * k), 2 * batch * n * k
    larger, size = ("a", sizes[0]) if sizes[0] > sizes[1] else ("b", sizes[1])
    places = live.in_other_places(product, at, PLACES, ROOM, CACHE)
    begins = [getattr(x, larger) for x in places]
    assert places == [at._replace(**{larger: x}) for x in begins]
    assert all(y - x >= size for x, y in pairwise([*sorted(begins), ROOM + 2 * CACHE]))
    assert all(x >= ROOM and x % 128 == offset for x in begins)
    assert not any(x < ROOM + CACHE < x + size for x in begins)
    assert len(begins) == min(PLACES, 2 * (CACHE // (-(-(size + 128) // 1024) * 1024)))
    halves = [x >= ROOM + CACHE for x in begins]
    assert halves == sorted(halves, reverse=True)


def test_of_places_for_small_operands_no_more_are_made_than_are_asked_for() -> None:
    assert len(live.in_other_places(linear(1, 1, 1), Addresses(0, 0, 0), 3, ROOM, 2**60)) == 3


class Memory:
    """What torch's allocator gives: the next address, or nothing beyond `limit` bytes."""

    def __init__(self, limit: float = math.inf) -> None:
        self.taken, self.limit = [(0, 0)], limit
        self.OutOfMemoryError, self.int32, self.uint8 = MemoryError, 4, 1
        self.cuda = SimpleNamespace(device=lambda ordinal: nullcontext(), Event=lambda **options: Recorded())

    def empty(self, shape: Any, dtype: int, device: str) -> Any:
        begin = 2**41 + sum(size for _, size in self.taken)
        size = -(-math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype // 512) * 512
        if size > self.limit:
            raise self.OutOfMemoryError
        self.taken.append((begin, size))
        return SimpleNamespace(data_ptr=lambda: begin if size else 0, zero_=lambda: None)


class Recorded:
    """An event that has not come to pass."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False


def a_round(
    monkeypatch, memory: Memory, product: Product, at: Addresses, in_a_row: int
) -> tuple[Any, list[Any], list[int]]:
    """The round, addresses of its runs, and its pause."""
    monkeypatch.setitem(sys.modules, "torch", memory)
    monkeypatch.setattr(live, "relaxed", nullcontext)
    monkeypatch.setattr(live.facts, "device", lambda ordinal: SimpleNamespace(l2_bytes=CACHE))
    here, runs, pauses = live.CudaLive(0), list[Any](), list[int]()
    vars(here)["_kernels"] = (lambda stream, ns: pauses.append(ns), lambda stream, address, words: None)
    made = here.round(product, [lambda place, stream: runs.append(place)], at, 0, in_a_row, 1)
    return made, runs, pauses


def test_later_runs_have_weights_of_their_own_and_leave_the_output_alone(monkeypatch) -> None:
    memory, product, at = Memory(), linear(16, 2048, 512), Addresses(2048, 4096, 8192 + 64)
    made, runs, (pause,) = a_round(monkeypatch, memory, product, at, 10)
    _, (room, size), (scratch, given) = memory.taken
    assert (made.valid(), len(runs), runs[0]) == (True, 10, at)
    assert size == 2 * CACHE
    assert given >= 64 + 2 * 16 * 2048
    assert all(run == at._replace(b=run.b, out=scratch + 64) for run in runs[1:])
    others = [run.b for run in runs[1:7]]  # three fit into either half
    assert all(room <= b <= room + size - 2 * 2048 * 512 for b in others)
    assert len({*others}) == 6
    assert [run.b for run in runs[7:]] == [at.b, *others[:2]]
    _, _, (shorter,) = a_round(monkeypatch, Memory(), product, at, 1)
    assert pause - shorter == 9 * live.RUN


def test_an_output_that_is_read_is_written_nowhere(monkeypatch) -> None:
    product = linear(16, 2048, 512, c=Strides(2048, 1), dtype_c="bfloat16", beta=1.0)
    memory, at = Memory(), Addresses(2048, 4096, 8192, c=8192)
    for in_a_row in (1, 10):
        _, runs, _ = a_round(monkeypatch, memory, product, at, in_a_row)
        assert {run.out for run in runs} == {memory.taken[-1][0]}
        assert {(run.a, run.c) for run in runs} == {(at.a, at.c)}


def test_what_no_cache_holds_is_run_as_it_lies(monkeypatch) -> None:
    memory, at = Memory(), Addresses(2048, 4096, 8192)
    _, runs, _ = a_round(monkeypatch, memory, linear(1, 4096, 2048), at, 4)
    assert runs == [at] * 4
    assert memory.taken[-1][1] == 0


def test_without_memory_there_is_no_round(monkeypatch) -> None:
    assert a_round(monkeypatch, Memory(CACHE), linear(16, 64, 64), Addresses(0, 0, 0), 1)[0] is None


def test_rounds_of_several_threads_leave_the_switches_between_threads_as_they_were() -> None:
    """The one that comes second must not take the first one's haste for what was before."""
    before = sys.getswitchinterval()
    inside, out = Barrier(2), Signal()

    def second() -> None:
        with live._SWITCHES:
            inside.wait()
            out.wait()

    thread = Thread(target=second)
    with live._SWITCHES:
        thread.start()
        inside.wait()
        assert sys.getswitchinterval() == pytest.approx(live.SWITCH)
    assert sys.getswitchinterval() == pytest.approx(live.SWITCH)
    out.set()
    thread.join()
    assert sys.getswitchinterval() == before


def test_a_round_whose_pause_was_over_does_not_count(monkeypatch):
    memory = Memory()
    memory.cuda.Event = lambda **_: SimpleNamespace(record=lambda: None, query=lambda: True)
    made, _, _ = a_round(monkeypatch, memory, linear(16, 64, 64), Addresses(256, 512, 1024), 1)
    assert not made.valid()


def test_a_round_ends_with_its_last_kernel(monkeypatch):
    monkeypatch.setattr(live, "relaxed", nullcontext)
    done, running = (SimpleNamespace(query=lambda over=over: over) for over in (True, False))
    assert not live.CudaRound([[done, done], [done, running]], 1, 1.0, True).done()
    assert live.CudaRound([[done, done], [done, done]], 1, 1.0, True).done()


def test_patience_is_a_longer_pause(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", Memory())
    monkeypatch.setattr(live, "relaxed", nullcontext)
    monkeypatch.setattr(live.facts, "device", lambda ordinal: SimpleNamespace(l2_bytes=CACHE))
    here, pauses = live.CudaLive(0), []
    vars(here)["_kernels"] = (lambda stream, ns: pauses.append(ns), lambda stream, at, words: None)
    for patience in (1, 3):
        here.round(linear(16, 64, 64), [lambda p, s: None], Addresses(256, 512, 1024), 0, 1, patience)
    assert pauses[1] == 3 * pauses[0]


def test_a_comparison_takes_a_part_of_what_is_free(monkeypatch):
    class Lacking(Exception):
        pass

    def compared(free, reserved=0, allocated=0, error=None):
        def differing(*_):
            if error is not None:
                raise error
            return [0]

        cuda = SimpleNamespace(
            mem_get_info=lambda device: (free, 2**40), memory_reserved=lambda device: reserved,
            memory_allocated=lambda device: allocated,
        )  # fmt: skip
        pretended = SimpleNamespace(cuda=cuda, OutOfMemoryError=Lacking, Generator=lambda **_: None, device=str.format)
        monkeypatch.setitem(sys.modules, "torch", pretended)
        monkeypatch.setattr(live.facts, "current_stream", lambda device: 0)
        monkeypatch.setattr(live.compare, "differing", differing)
        return live.CudaLive(0).differing(linear(16, 64, 64), None, [None])

    size = live.compare.nbytes(linear(16, 64, 64))
    assert compared(4 * size) == [0]
    assert compared(4 * size - 4) is None
    assert compared(0, 5 * size, size) == [0]
    assert compared(4 * size, error=Lacking()) is None
