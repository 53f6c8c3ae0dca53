"""The thread count: from the environment, from the call, and never out of range."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import isogemm
from isogemm.base import threads
from isogemm.errors import OptionError

NAME = "ISOGEMM_NUM_THREADS"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process."""
    monkeypatch.setattr(threads, "chosen", 0)
    monkeypatch.delenv(NAME, raising=False)


def test_default_is_the_cpus_of_the_process() -> None:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert isogemm.get_num_threads() == available


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("7", 7), (" 3 ", 3)])
def test_environment(text: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, text)
    assert isogemm.get_num_threads() == count
    monkeypatch.setenv(NAME, "2")  # read once
    assert isogemm.get_num_threads() == count


def test_empty_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    default = isogemm.get_num_threads()
    monkeypatch.setattr(threads, "chosen", 0)
    monkeypatch.setenv(NAME, " ")
    assert isogemm.get_num_threads() == default


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "0x2", "1e1"])
def test_wrong_environment_names_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.raises(OptionError, match=f"{NAME}: .*at least 1; got: {re.escape(repr(text))}; nearest legal choice"):
        isogemm.get_num_threads()


@pytest.mark.parametrize("count", [1, 2, 5, 8, np.int64(3), np.array(4)])
def test_set(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "3")
    isogemm.set_num_threads(count)
    assert isogemm.get_num_threads() == count
    assert type(isogemm.get_num_threads()) is int


def test_more_threads_than_cpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, most in ((1, 8), (2, 8), (8, 8), (96, 96), (2000, 2000)):
        monkeypatch.setattr(threads, "available", lambda available=available: available)
        isogemm.set_num_threads(1000)
        assert isogemm.get_num_threads() == min(most, 1000)
        assert isogemm.plan(4096, 4096, 4096).threads == min(most, 1000)
        monkeypatch.setattr(threads, "chosen", 0)
        monkeypatch.setenv(NAME, "500")
        assert isogemm.get_num_threads() == min(most, 500)


@pytest.mark.parametrize(
    "count", [0, -1, True, False, 1.0, "2", None, np.True_, np.float32(2), np.array([2]), np.array(True)]
)
def test_wrong_counts_change_nothing(count: object) -> None:
    isogemm.set_num_threads(2)
    with pytest.raises(OptionError, match=re.escape(f"got: {count!r}")):
        isogemm.set_num_threads(count)
    assert isogemm.get_num_threads() == 2


def test_plans_use_it() -> None:
    for count in (1, 2, 5):
        isogemm.set_num_threads(count)
        assert isogemm.plan(256, 4096, 4096).threads == count


def test_environment_of_a_process() -> None:
    """A whole process with one thread starts no worker."""
    text = """
import sys, threading, time
import numpy as np, isogemm
isogemm.matmul(np.ones((64, 256), np.float32), np.ones((256, 256), np.float32))
until = time.monotonic() + 30  # a product does not wait for a thread that has not begun
while (found := sum(t.name.startswith("isogemm-") for t in threading.enumerate())) < int(sys.argv[1]):
    if time.monotonic() > until:
        break
    time.sleep(0.01)
print(isogemm.get_num_threads(), found)
"""
    for count, workers in ((1, 0), (3, 2)):
        env = os.environ | {NAME: str(count)}
        done = subprocess.run(
            [sys.executable, "-c", text, str(workers)], capture_output=True, text=True, timeout=300, env=env
        )
        assert done.stdout.split() == [str(count), str(workers)], done.stderr
