"""Verdicts on kernels that are no products: one trial for many threads and processes, and what a difference says."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.planner.fakes import FakeMachine

from isogemm.errors import ContractError, DeviceError
from isogemm.planner.admission import Records
from isogemm.planner.kernel_admission import Candidate, KernelAdmissions, difference, fingerprint


def candidate(name: str, why: str = "", tried: list[str] | None = None, source: str = "s") -> Candidate[str]:
    def trial(machine: Any) -> str:
        if tried is not None:
            tried.append(name)
        time.sleep(0.01)
        return why

    return Candidate(name, "A=1", source, trial, lambda: f"built {name}")


def test_many_threads_try_once(tmp_path):
    tried: list[str] = []
    found: list[str] = []
    admissions = KernelAdmissions(FakeMachine(), Records(tmp_path))
    one = candidate("fast", tried=tried)
    threads = [
        threading.Thread(target=lambda: found.append(admissions.first("it", [one], nearest=""))) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == ["built fast"] * 8
    assert tried == ["fast"]


def test_a_damaged_record_costs_a_trial(tmp_path):
    tried: list[str] = []
    for text in ("{", '{"schema": "isogemm.admission.v1"}', ""):
        for _ in range(2):
            KernelAdmissions(FakeMachine(), Records(tmp_path)).verdict(candidate("fast", tried=tried))
        (path,) = tmp_path.glob("*.json")
        assert json.loads(path.read_text())["key"]["kernel"] == "fast"
        path.write_text(text)
    assert tried == ["fast"] * 3


def test_the_first_right_one_serves_and_later_ones_are_not_tried(tmp_path):
    tried: list[str] = []
    three = [
        candidate(n, why, tried) for n, why in (("a", "1 of 2 differ, first y[0] 0x1 for 0x0"), ("b", ""), ("c", ""))
    ]
    admissions = KernelAdmissions(FakeMachine(), Records(tmp_path))
    assert admissions.first("it", three, nearest="") == "built b"
    assert tried == ["a", "b"]
    assert [(k.name, k.verdict.state) for k in admissions.known()] == [("a", "refused"), ("b", "admitted")]
    with pytest.raises(
        ContractError, match=r"no kernel on NVIDIA H200.*bits are those of it.*a: refused 1 of 2 .*nearest.*cpu"
    ):
        admissions.first("it", three[:1], nearest="cpu")


def test_captures(tmp_path):
    admissions = KernelAdmissions(FakeMachine(captures=True), Records(tmp_path))
    with pytest.raises(DeviceError, match="first call of it"):
        admissions.first("it", [candidate("a")], nearest="")
    assert not list(admissions.known())  # and it is tried when the capture has ended
    admissions.machine.captures = False
    assert admissions.first("it", [candidate("a")], nearest="") == "built a"


def test_what_voids_a_verdict(tmp_path):
    tried: list[str] = []
    one = candidate("a", tried=tried)
    for parts in ({}, {"torch": "3.0"}, {"driver": "1"}, {"triton": "4"}, {"device": "another"}, {}):
        machine = FakeMachine(parts={**FakeMachine().parts, **parts})
        KernelAdmissions(machine, Records(tmp_path)).verdict(one)
    assert len(tried) == 4  # torch only lends memory
    KernelAdmissions(FakeMachine(), Records(tmp_path)).verdict(candidate("a", tried=tried, source="other"))
    assert len(tried) == 5


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


def test_fingerprints(tmp_path: Path):
    a, b = tmp_path / "a.cu", tmp_path / "b.cu"
    a.write_text("1")
    b.write_text("2")
    assert fingerprint(a, b) == fingerprint(b, a)
    before = fingerprint(a, b)
    b.write_text("3")
    assert fingerprint(a, b) != before
