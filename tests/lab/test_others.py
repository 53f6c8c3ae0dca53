"""Other programs' work, told from our own by what the machine counts."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from isogemm.lab import others


@pytest.fixture
def machine(monkeypatch):
    """Three CPUs of which this process may use 0 and 2; what they did is set by tests."""
    state = SimpleNamespace(now=100.0, own=1.0, work=[50.0, 70.0, 30.0])

    def times(percpu):
        assert percpu
        fields = {"idle": 900.0, "iowait": 9.0, "guest": 5.0}
        named = [SimpleNamespace(user=work, **fields) for work in state.work]
        return [_Times(each) for each in named]

    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_affinity=lambda: [0, 2]))
    monkeypatch.setattr(others.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(others.os, "times", lambda: (state.own, 0.5, 0.25, 0.0, 7.0))
    return state


class _Times(tuple):
    """As psutil's: a tuple with names."""

    def __new__(cls, fields):
        made = super().__new__(cls, vars(fields).values())
        made.__dict__.update(vars(fields))
        return made


def test_what_is_not_ours_is_the_others(machine):
    seen = others.Others()
    machine.now += 10.0
    machine.own += 8.0
    machine.work = [50.0 + 9.0, 70.0 + 10.0, 30.0 + 6.0]
    assert seen.mean() == pytest.approx(0.7)  # of 15 seconds 8 are ours; CPU 1 is not
    machine.own += 20.0
    assert seen.mean() == 0.0  # counted in steps, our own may seem to be more


def test_too_short_a_time_tells_nothing(machine):
    seen = others.Others()
    machine.now += 0.5
    assert seen.mean() is None


def test_a_real_machine_has_no_more_than_its_cpus():
    seen = others.Others()
    seen._begin = (seen._begin[0] - 10.0, *seen._begin[1:])
    assert 0.0 <= seen.mean() <= 0.1 * psutil.cpu_count()
