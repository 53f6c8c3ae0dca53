"""What a round of timed kernels counts as, whatever the device says of it."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.fakes import linear

from isogemm.backends.cuda.gemm import live
from isogemm.problem.product import Addresses

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


@given(m=st.integers(1, 4096), n=st.integers(1, 4096), k=st.integers(1, 4096), count=st.integers(1, 12))
def test_later_runs_have_operands_of_their_own_and_leave_the_output_alone(m, n, k, count) -> None:
    """Within memory of twice the cache, what is not in the cache first."""
    room, cache, scratch = 2**40, 2**23, 2**50
    at = Addresses(1024, 2048, 4096)
    size, larger = (2 * k * max(m, n), "a" if m > n else "b")
    runs = live.in_other_places(linear(m, n, k), at, count, room, cache, scratch)
    assert len(runs) == count
    assert runs[0] == at
    others = [getattr(x, larger) for x in runs if x != at]
    assert all(x == at._replace(out=scratch, **{larger: getattr(x, larger)}) for x in runs if x != at)
    begins = sorted(set(others))
    assert all(y - x >= size for x, y in pairwise([*begins, room + 2 * cache]))
    assert all(x >= room and x % 512 == 0 for x in begins)
    assert not any(x < room + cache < x + size for x in begins)
    half = [x >= room + cache for x in others[: len(begins)]]
    assert half == sorted(half, reverse=True)
    if cache // (size + 1024) * 2 + 1 >= count:
        assert len(begins) == count - 1
