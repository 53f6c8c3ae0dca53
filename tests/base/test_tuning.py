"""The budget of timing at run time: words, numbers, the environment, and what is refused."""

from __future__ import annotations

import pytest

import isogemm
from isogemm.base import tuning
from isogemm.errors import OptionError


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setattr(tuning, "_budget", None)
    monkeypatch.delenv("ISOGEMM_TUNING", raising=False)


@pytest.mark.parametrize(
    ("text", "budget"), [(None, 30.0), ("", 30.0), ("on", 30.0), (" OFF ", 0.0), ("0", 0.0), ("12.5", 12.5)]
)
def test_the_environment_says_it(text, budget, monkeypatch):
    if text is not None:
        monkeypatch.setenv("ISOGEMM_TUNING", text)
    assert isogemm.get_tuning() == budget


@pytest.mark.parametrize(("given", "budget"), [("on", 30.0), ("off", 0.0), (5, 5.0), (0, 0.0), (2.5, 2.5)])
def test_a_call_says_it(given, budget):
    isogemm.set_tuning(given)
    assert isogemm.get_tuning() == budget


@pytest.mark.parametrize("given", ["fast", "-1", -1, float("inf"), float("nan"), True, None, [3]])
def test_what_is_no_budget_is_refused(given):
    isogemm.set_tuning(7)
    with pytest.raises(OptionError, match="on, off, or milliseconds"):
        isogemm.set_tuning(given)
    assert isogemm.get_tuning() == 7.0
