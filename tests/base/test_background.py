"""Work that nobody waits for: by rank, in a few threads, dropped at the end and by a fork."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from tests.process import python

from isogemm.base import background


@pytest.fixture
def crew(monkeypatch):
    monkeypatch.setattr(background, "_most", lambda: 1)
    made = background._Crew()
    monkeypatch.setattr(background, "_crew", made)
    yield made
    made.stop()


def test_a_lower_rank_goes_first(crew):
    order, go, done = [], threading.Event(), threading.Event()
    background.submit(go.wait)
    for rank, name in ((1, "later"), (0, "first"), (1, "last"), (0, "second")):
        background.submit(lambda name=name: order.append(name), rank)
    background.submit(done.set, 2)
    go.set()
    assert done.wait(10)
    assert order == ["first", "second", "later", "last"]


def test_work_of_any_rank_is_work_that_can_be_waited_for(crew):
    """Timing waits for it: kernels that were built for later once spoilt every round of a product."""
    go = threading.Event()
    background.submit(go.wait, 1)
    assert background.busy()
    assert not background.wait(0.01)
    go.set()
    assert background.wait(10)
    assert not background.busy()


def test_threads_end_with_the_work_and_outlive_an_exception(crew, caplog):
    for task in (lambda: None, lambda: 1 / 0, lambda: None):
        done = threading.Event()
        background.submit(task)
        background.submit(done.set)
        assert done.wait(10)
        for thread in list(crew.threads):
            thread.join(10)
        assert not crew.threads
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


def test_where_no_thread_can_be_started_work_waits_for_the_next_one(crew, monkeypatch):
    """As in an interpreter that ends, or a system out of threads: what is submitted is no caller's business."""
    done, start = threading.Event(), threading.Thread.start

    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    background.submit(done.set)
    assert not crew.threads
    monkeypatch.setattr(threading.Thread, "start", start)
    background.submit(lambda: None)
    assert done.wait(10)
    assert background.wait(10)


def test_what_waits_at_the_end_is_dropped_and_what_runs_is_waited_for(crew):
    began, go, did = threading.Event(), threading.Event(), []

    def long():
        began.set()
        go.wait()
        did.append(("long", background.ending()))

    background.submit(long)
    background.submit(lambda: did.append("dropped"), 1)
    began.wait()
    stopping = threading.Thread(target=crew.stop)
    assert not background.ending()
    stopping.start()
    while not crew.over:
        time.sleep(0.001)
    go.set()
    stopping.join(10)
    assert did == [("long", True)]
    assert not background.ending()
    background.submit(lambda: did.append("late"))
    assert not crew.threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_has_none_of_its_parents_work(tmp_path: Path):
    code = f"""
import os, signal, threading, time
from isogemm.base import background
background._most = lambda: 1
go, seen = threading.Event(), threading.Event()
background.submit(go.wait)
background.submit(lambda: open({str(tmp_path / "seen")!r}, "a").write(f"{{os.getpid()}}\\n"))
background.submit(seen.set)
child = os.fork()
if not child:
    signal.alarm(10)  # for work of its parent's it would wait without an end
    done = threading.Event()
    background.submit(done.set)
    os._exit(0 if done.wait() and len(background._crew.waiting) == 0 else 1)
_, status = os.waitpid(child, 0)
go.set()
assert seen.wait(100)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    python("-W", "ignore", "-c", code)
    assert len((tmp_path / "seen").read_text().splitlines()) == 1
