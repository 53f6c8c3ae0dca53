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
    assert live.CudaRound(pairs, PAUSE, valid).whole() == pytest.approx(counted)
