"""The thread pool: concurrent callers, thread counts, forked children, workers that sleep, foreign rounding modes."""

from __future__ import annotations

import _thread
import os
import threading
import time

import numba
import numpy as np
import pytest
from tests.process import python
from tests.products import assert_same, poisoned, product, values

import isogemm
from isogemm.backends.cpu.emit.scalars import poke64
from isogemm.backends.cpu.gemm import execute
from isogemm.backends.cpu.pool import HIRED, WANTED, Pool, _worker, give, pool, run_chunks, take
from isogemm.problem.settings import PLAIN

# Enough work for a grid of several chunks; each takes another walk.
SHAPES = ((1, 300, 400), (7, 300, 200), (50, 130, 90), (210, 70, 60))
NOTES = 64  # words of a task array before what `_noted` leaves there


@pytest.fixture(autouse=True)
def _threads() -> None:
    isogemm.set_num_threads(2)


def prepared(shape: tuple[int, int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m, n, k = shape
    a, w = values((m, k), seed=seed, special=True), values((n, k), seed=seed + 1, special=True)
    return a, w.T, product(a, w.T)


def check(a: np.ndarray, b: np.ndarray, want: np.ndarray) -> None:
    out = poisoned(want.shape)
    execute.gemm(a, b, out, PLAIN)
    assert_same(out, want)


def run_python(text: str, **environment: str) -> str:
    """Standard output of a script in a process of its own, which must end well and in time."""
    return python("-c", text, **environment).strip()


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5])
def test_thread_counts(threads: int) -> None:
    isogemm.set_num_threads(threads)
    for shape in SHAPES:
        check(*prepared(shape))


def test_concurrent_callers() -> None:
    """The pool serves one of them at a time; the others compute their chunks themselves."""
    cases = [prepared(SHAPES[i % len(SHAPES)], seed=i) for i in range(6)]
    start, failures = threading.Barrier(len(cases)), []

    def call(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        start.wait()
        try:
            for _ in range(150):
                check(*case)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=call, args=(case,), daemon=True) for case in cases]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(300)
    assert not any(caller.is_alive() for caller in callers)
    assert failures == []


def test_concurrent_changes_of_the_thread_count() -> None:
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for count in (1, 4, 2, 3):
                isogemm.set_num_threads(count)
                time.sleep(0)

    changer = threading.Thread(target=change, daemon=True)
    changer.start()
    try:
        cases = [prepared(shape) for shape in SHAPES]
        for _ in range(60):
            for case in cases:
                check(*case)
    finally:
        stop.set()
        changer.join(10)


IDLE = """
import threading, time
import numpy as np
import isogemm
from tests.products import assert_same, product, values

isogemm.set_num_threads(2)
a, b = values((1, 400)), values((400, 300), seed=1)
want = product(a, b)
gaps = [g * 1e-5 for g in range(200)]
for gap in gaps * 3:
    assert_same(isogemm.matmul(a, b), want)
    until = time.perf_counter() + gap
    while time.perf_counter() < until:
        pass
print("done")
"""


def test_workers_that_fall_asleep_between_calls() -> None:
    """Gaps of 0 to 2 ms: around the moment at which a worker goes to sleep, with a task published just then."""
    assert run_python(IDLE) == "done"


def test_an_idle_pool_wakes() -> None:
    case = prepared(SHAPES[0])
    for gap in (0.0, 0.02, 0.2, 0.0):
        time.sleep(gap)
        check(*case)
    workers = [t for t in threading.enumerate() if t.name.startswith("isogemm-")]
    assert workers
    assert all(t.daemon for t in workers)  # an interpreter that ends does not wait for them


FORK = """
import os, signal, sys, warnings
import numpy as np
import isogemm
from tests.products import assert_same, product, values

isogemm.set_num_threads(3)
a, b = values((7, 400)), values((400, 300), seed=1)
want = product(a, b)
assert_same(isogemm.matmul(a, b), want)
warnings.simplefilter("ignore")
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(240)
        try:
            for _ in range(5):
                assert_same(isogemm.matmul(a, b), want)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert_same(isogemm.matmul(a, b), want)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_children_after_the_parent_used_the_pool() -> None:
    assert run_python(FORK) == "[0, 0, 0]"


FLUSH = """
import numpy as np, torch
import isogemm
from tests.products import values

SHAPES = (1, 300, 400), (20, 300, 40), (210, 70, 60), (3, 5, 7)
wide = [(values((m, k), seed=1) * np.float32(2.0**-68), values((n, k), seed=2) * np.float32(2.0**-68))
        for m, n, k in SHAPES]
half = [(values((m, k), seed=3) * np.float32(2.0**-21), values((n, k), seed=4)) for m, n, k in SHAPES]
half = [[x.astype(np.float16) for x in pair] for pair in half]  # subnormal a

def bits(threads):
    isogemm.set_num_threads(threads)
    found = []
    for a, w in wide:
        found += [isogemm.linear(a, w), isogemm.linear(a, isogemm.pack(w)), isogemm.gemm(a, w, alpha=0.3, trans_b="T")]
    for a, w in half:
        found += [isogemm.linear(a, w, out_dtype="float32"), isogemm.linear(a, w)]
    return [x.view(np.uint32 if x.itemsize == 4 else np.uint16) for x in found]

before = [bits(1), bits(2)]
assert all(0 < (x & 0x7FFFFFFF).max() < 0x00800000 for x in before[0][:12])  # subnormal sums
assert torch.set_flush_denormal(True)
assert (torch.tensor([1e-30]) * 1e-10).item() == 0.0  # this thread does flush
after = [bits(1), bits(2)]
assert (torch.tensor([1e-30]) * 1e-10).item() == 0.0  # and still does: the caller's mode is restored
print(all(np.array_equal(x, y) for found in (before[1], *after) for x, y in zip(before[0], found, strict=True)))
"""


def test_a_caller_that_flushes_subnormals_gets_the_same_bits() -> None:
    pytest.importorskip("torch")
    assert run_python(FLUSH) == "True"


def test_a_failed_call_leaves_the_pool_free() -> None:
    with pytest.raises(AttributeError):
        execute.gemm(values((300, 300)), values((300, 300)), None, PLAIN)
    assert take(pool().words, 2)
    try:
        for shape in SHAPES:  # the pool is busy: these work alone
            check(*prepared(shape))
        assert not take(pool().words, 2)
    finally:
        give(pool().words, 2)
    check(*prepared(SHAPES[0]))


def test_exceptions_at_any_moment() -> None:
    """From signals, hooks and other threads: nothing is written afterwards, and the pool is free and whole."""
    said = python("tools/soak_signals.py", "--seconds", "2", "--sweep", "11", "--least", "100")
    assert int(said.partition("raised: ")[2].split()[0]) >= 100


def _listed() -> int:
    return sum(t.name.startswith("isogemm-") for t in threading.enumerate())


def test_surplus_workers_end_at_once() -> None:
    check(*prepared(SHAPES[2]))
    workers = pool()
    hired = int(workers._control[WANTED])
    until = time.monotonic() + 300
    while workers._control[HIRED] < hired or _listed() < hired:  # those that have just been started come later
        assert time.monotonic() < until
        time.sleep(0.001)
    before = {t.ident for t in threading.enumerate()}
    for _ in range(4):
        _worker(workers._control, workers.words)
    assert int(workers._control[HIRED]) == hired
    assert {t.ident for t in threading.enumerate()} <= before


def test_a_system_without_more_threads_gets_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    monkeypatch.setattr("isogemm.backends.cpu.pool.current", Pool())
    isogemm.set_num_threads(4)
    for shape in SHAPES:
        check(*prepared(shape))


@numba.cfunc("void(int64, int64, int64)")
def _noted(tasks, chunk, scratch):
    poke64(tasks + (NOTES + chunk) * 8, scratch)


def test_the_first_chunk_is_the_callers_own() -> None:
    """What a thread's own cache holds of the weights is what it wants again."""
    tasks, chunks, own = np.zeros(NOTES + 4, np.int64), 4, Pool()
    for _ in range(3000):
        tasks[NOTES:] = 0
        assert own.run(run_chunks, 64, 2, _noted.address, tasks.ctypes.data, chunks) == 0
        assert tasks[NOTES] == own.memory[1]
        assert tasks[NOTES:].all()


def test_scratch_grows_and_stays() -> None:
    for shape in ((1, 64, 64), (210, 300, 700), (1, 64, 64), (300, 40, 900)):
        check(*prepared(shape))
