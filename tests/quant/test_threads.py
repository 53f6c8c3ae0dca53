"""One matrix in several Python threads: what one of them drops or makes anew, no other one misses or takes for new."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.formats.test_blocks import same
from tests.quant.draws import WEIGHTS, values
from tests.quant.test_linear import weight

import isogemm
from isogemm.quant import FORMATS, QuantizedMatrix


def between_lines(function: Callable[[], Any], code: Any, act: Callable[[], None]) -> Any:
    """Call `function`, and `act` before each line that code runs: what another thread may do there."""

    def lines(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            sys.settrace(None)
            act()
            sys.settrace(calls)
        return lines

    def calls(frame: Any, event: str, argument: Any) -> Any:
        return lines if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        return function()
    finally:
        sys.settrace(before)


def test_panels_that_another_thread_forgets_are_still_returned():
    w, times = weight(FORMATS["Q4_0"], 17, 2), []
    want = w.panels().data.copy()
    for _ in range(2):
        panels = between_lines(w.panels, QuantizedMatrix.panels.__code__, lambda: (times.append(0), w.forget())[1])
        same(panels.data, want)
    assert len(times) > 4


def test_nobody_takes_panels_of_bytes_that_torch_has_written_since():
    """Whoever sees that the write was noticed finds nothing that is older."""
    torch = pytest.importorskip("torch")
    from isogemm.torch.quant.ops import blocks_of

    w, x, old = weight(FORMATS["Q4_0"], 17, 2), values("normal", 3, 64), []
    isogemm.linear(x, w)
    blocks_of(w).copy_(torch.from_numpy(weight(FORMATS["Q4_0"], 17, 2, seed=1).rows))
    kept = w._kept

    def look() -> None:
        old.append(w._seen == w._tensor._version and w._kept is kept)

    between_lines(w.check, QuantizedMatrix._notice.__code__, look)
    assert len(old) > 1
    assert not any(old)
    same(isogemm.linear(x, w), isogemm.linear(x, weight(FORMATS["Q4_0"], 17, 2, seed=1)))


@pytest.mark.parametrize("fmt", WEIGHTS[::3], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_many_threads_at_once(fmt, in_place):
    """Panels are made by whoever comes first, and dropped all the time."""
    w, x = weight(fmt, 99, 3), values("heavy", 5, 3 * fmt.block)
    want = isogemm.linear(x, w[:])
    w = w.in_place() if in_place else w
    start, found, failed = threading.Barrier(5), list[np.ndarray](), list[BaseException]()

    def work(drops: bool) -> None:
        try:
            start.wait()
            for _ in range(8):
                found.append(isogemm.linear(x, w))
                if drops:
                    w.forget()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i == 0,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(found) == 40
    for out in found:
        same(out, want)
