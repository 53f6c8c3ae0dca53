"""What a round of timed kernels counts as, whatever the device says of it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from isogemm.backends.cuda.gemm import live

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
