"""Kernels of any kind: one trial for many threads and processes, what a difference says, and what is written beside."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.planner.fakes import FakeKernel, FakeMachine

from isogemm.errors import ContractError, DeviceError
from isogemm.planner.admission import Admissions
from isogemm.planner.bench import MARGIN, POISON, Bench, among_poison, difference
from isogemm.planner.choose import Option, choose, first
from isogemm.planner.records import Records


def served(admissions: Admissions, *kernels: FakeKernel) -> str:
    options = [Option(kernel, "A=1") for kernel in kernels]
    return choose(options, "case", admissions, what="it", nearest="cpu").launch


def test_many_threads_try_once(tmp_path: Path) -> None:
    found: list[str] = []
    admissions, one = Admissions(FakeMachine(), Records(tmp_path)), FakeKernel("fast")
    threads = [threading.Thread(target=lambda: found.append(served(admissions, one))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == ["built fast"] * 8
    assert one.tried == ["fast"]


def test_a_damaged_record_costs_a_trial(tmp_path: Path) -> None:
    one = FakeKernel("fast")
    for text in ("{", '{"schema": "isogemm.admission.v2"}', ""):
        for _ in range(2):
            Admissions(FakeMachine(), Records(tmp_path)).verdict(one, "case", "A=1")
        (path,) = tmp_path.glob("*.json")
        assert json.loads(path.read_text())["key"]["kernel"] == "fast"
        path.write_text(text)
    assert one.tried == ["fast"] * 3


def test_the_first_right_one_serves_and_later_ones_are_not_tried(tmp_path: Path) -> None:
    tried: list[str] = []
    a = FakeKernel("a", "1 of 2 differ, first y[0] 0x1 for 0x0", tried)
    admissions = Admissions(FakeMachine(), Records(tmp_path))
    assert served(admissions, a, FakeKernel("b", "", tried), FakeKernel("c", "", tried)) == "built b"
    assert tried == ["a", "b"]
    assert [(k.name, k.admission.state) for k in admissions.known()] == [("a", "refused"), ("b", "admitted")]
    assert first([Option(a, "A=1")], "case", admissions, what="it") is None
    message = r"no kernel on NVIDIA H200.*bits are those of it.*a \[A=1\]: refused 1 of 2 .*nearest.*cpu"
    with pytest.raises(ContractError, match=message):
        served(admissions, a)


def test_captures(tmp_path: Path) -> None:
    machine = FakeMachine(captures=True)
    admissions = Admissions(machine, Records(tmp_path))
    with pytest.raises(DeviceError, match="first call of it"):
        served(admissions, FakeKernel("a"))
    assert not list(admissions.known())  # and it is tried when the capture has ended
    machine.captures = False
    assert served(admissions, FakeKernel("a")) == "built a"


def test_what_voids_a_verdict(tmp_path: Path) -> None:
    one = FakeKernel("a")
    for parts in ({}, {"torch": "3.0"}, {"driver": "1"}, {"triton": "4"}, {"device": "another"}, {}):
        machine = FakeMachine(parts={**FakeMachine().parts, **parts})
        Admissions(machine, Records(tmp_path)).verdict(one, "case", "A=1")
    assert len(one.tried) == 4  # torch only lends memory
    one.home = "other"
    Admissions(FakeMachine(), Records(tmp_path)).verdict(one, "case", "A=1")
    assert len(one.tried) == 5


def test_the_last_refusal_is_not_hidden_by_a_kernel_that_cannot_be_bound(tmp_path: Path) -> None:
    class Broken(FakeKernel):
        def bind(self, case: str, config: str, device: int) -> str:
            raise RuntimeError("shared memory")

    admissions = Admissions(FakeMachine(), Records(tmp_path))
    assert served(admissions, Broken("a"), FakeKernel("b")) == "built b"
    with pytest.raises(ContractError, match="shared memory"):
        served(admissions, Broken("a"))


@pytest.mark.parametrize(("strides", "shift"), [(None, 0), ((40, 1), 0), ((1, 7), 3)])
@pytest.mark.parametrize("stray", [0, -1, 1])
def test_a_result_lies_between_margins(strides: tuple[int, int] | None, shift: int, stray: int) -> None:
    """A word written right before the result, or right after its last element, is seen; the result itself is read."""
    out = Bench(FakeMachine()).output((3, 5), 2, strides=strides, shift=shift)
    steps, flat = strides or (5, 1), out.buffer.flat
    for i, j in np.ndindex(3, 5):
        flat[MARGIN + shift + i * steps[0] + j * steps[1]] = 10 * i + j
    want = np.array([[10 * i + j for j in range(5)] for i in range(3)], np.uint16)
    if stray:
        last = 2 * steps[0] + 4 * steps[1]
        flat[MARGIN + shift + (-1 if stray < 0 else last + 1)] = 1
    assert (out.read()[0] == want).all()
    assert out.compare("y", want) == ("1 words beside y were written" if stray else "")
    assert "y[0, 0]" in out.compare("y", want + 1)


def test_operands_lie_among_poison() -> None:
    x = np.arange(6, dtype=np.uint16).reshape(2, 3)
    flat, view = among_poison(x, (9, 2), 4)
    assert (view == x).all()
    assert (flat == POISON[2]).sum() == flat.size - 6
    held = Bench(FakeMachine()).output((2,), 4, held=np.array([1.0, 2.0], np.float32))
    assert (held.read()[0].view(np.float32) == [1, 2]).all()


def test_differences():
    want = np.array([[1, -0.0], [np.nan, 3]], ml_dtypes.bfloat16)
    assert difference("y", want.view(np.uint16), want) == ""
    got = want.copy()
    got[0, 1] = 0
    assert difference("y", got.view(np.uint16), want) == "1 of 4 differ, first y[0, 1] 0x0000 for 0x8000"
    assert difference("y", got.view(np.uint16), want.view(np.uint16)) != ""
    other = want.view(np.uint16).copy()
    other[1, 0] ^= 1  # another NaN
    assert "y[1, 0]" in difference("y", other, want)
