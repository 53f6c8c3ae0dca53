"""Choosing at run time on a real GPU: whatever serves meanwhile, and whatever takes over, has the same bits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.backends.cuda.device import BF16, check_sample, draw, same

import isogemm
from isogemm.backends.cuda import device as backend
from isogemm.backends.cuda.driver import machine
from isogemm.backends.cuda.gemm import choose
from isogemm.base import tuning
from isogemm.planner.admission import Admissions
from isogemm.planner.records import Records

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
SECONDS = 60.0


@pytest.fixture
def live(monkeypatch, tmp_path) -> Any:
    """A chooser without tables and with records of its own."""
    monkeypatch.setattr(tuning, "_budget", 30.0)
    monkeypatch.setattr(choose, "shipped_tables", lambda: ())
    monkeypatch.setattr(choose, "user_table_path", lambda name: None)
    monkeypatch.setattr(machine, "_made", lambda n: Admissions(machine.TorchMachine(n), Records(tmp_path)))
    backend.reload()
    yield choose.chooser(0).live
    backend.reload()


def settle(live: Any, *calls: Any) -> None:
    """Call until nothing is timed any more."""
    end = time.monotonic() + SECONDS
    while live._watches:
        assert time.monotonic() < end, list(live._watches)
        for call in calls:
            call()
        torch.cuda.synchronize()
        time.sleep(0.01)


SHAPES = ((5, 2880, 1856), (300, 1344, 2112), (40, 1001, 520))


def test_calls_keep_their_bits_while_kernels_change(live) -> None:
    operands = [(draw((m, k), "bfloat16", m), draw((n, k), "bfloat16", n)) for m, n, k in SHAPES]
    first = [isogemm.linear(x, w) for x, w in operands]
    for (x, w), y in zip(operands, first, strict=True):
        check_sample(y, x, w.T, BF16)

    def call() -> None:
        for (x, w), y in zip(operands, first, strict=True):
            same(isogemm.linear(x, w), y)

    settle(live, call)
    found = [isogemm.plan(m, n, k, dtype="bfloat16", device="cuda") for m, n, k in SHAPES[:2]]
    assert all(plan.reason.startswith("timed live at m") for plan in found)
    call()
    backend.reload()
    again = choose.chooser(0).live
    for (x, w), y in zip(operands[:2], first[:2], strict=True):
        same(isogemm.linear(x, w), y)
    assert again is not live
    assert not again._watches


def test_an_output_that_is_read_is_left_alone(live) -> None:
    x, w = draw((24, 1024), "bfloat16", 1), draw((1536, 1024), "bfloat16", 2)
    start = torch.randn(24, 1536, device="cuda")
    want = isogemm.gemm(x, w, trans_b="T", out=start.clone(), accumulate=True)

    def call() -> None:
        same(isogemm.gemm(x, w, trans_b="T", out=start.clone(), accumulate=True), want)

    settle(live, call)


def test_a_capture_is_not_disturbed_by_what_is_done_meanwhile(live) -> None:
    x, w = draw((48, 4096), "bfloat16", 3), draw((3072, 4096), "bfloat16", 4)
    y = isogemm.linear(x, w)
    graphs = []
    for _ in range(20):  # while other threads compile, try and compare
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = isogemm.linear(x, w)
        graphs.append((graph, out))
    settle(live, lambda: isogemm.linear(x, w))
    for graph, out in graphs:
        graph.replay()
        same(out, y)


def test_no_stream_of_torch_s_is_taken_for_trials(live) -> None:
    """They are 32, handed out in turn: a caller may be capturing on any, and a trial there would go into the graph."""
    graphs, taken = [], []

    def meanwhile() -> None:
        with live.bench.aside():
            taken.append(torch.cuda.current_stream().cuda_stream)
            assert torch.ones(8, device="cuda").sum().item() == 8

    for stream in [torch.cuda.Stream() for _ in range(32)]:
        x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            x += 1
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
            graph.capture_end()
        graphs.append((x, graph))
    for x, graph in graphs:
        graph.replay()
        torch.cuda.synchronize()
        assert x.tolist() == [1.0] * 8
    assert len(taken) == 32
    assert len(set(taken)) == 1  # threads that end leave it to the next


def test_threads_and_streams_may_call_meanwhile(live) -> None:
    x, w = draw((96, 2048), "bfloat16", 5), draw((2560, 2048), "bfloat16", 6)
    y = isogemm.linear(x, w)
    torch.cuda.synchronize()
    wrong = []

    def calls() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                got = isogemm.linear(x, w)
                torch.cuda.current_stream().synchronize()
                wrong.append(int((got.view(torch.int16) != y.view(torch.int16)).sum()))

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    settle(live, lambda: isogemm.linear(x, w))
    for thread in threads:
        thread.join()
    assert not any(wrong)


def test_warm_leaves_nothing_to_first_calls(live) -> None:
    done = isogemm.warm([(1536, 1024), (1024, 768)], (1, 16, 200), progress=False)
    assert len(done.plans) == 6
    assert not live._watches
    for n, k in ((1536, 1024), (1024, 768)):
        for m in (1, 16, 200):
            x, w = draw((m, k), "bfloat16", m), draw((n, k), "bfloat16", n)
            check_sample(isogemm.linear(x, w), x, w.T, BF16)
    assert not live._watches


def test_switched_off_nothing_is_done_elsewhere(live) -> None:
    isogemm.set_tuning("off")
    x, w = draw((7, 1024), "bfloat16", 7), draw((1088, 1024), "bfloat16", 8)
    check_sample(isogemm.linear(x, w), x, w.T, BF16)
    assert not live._watches
