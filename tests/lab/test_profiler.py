"""What the profiler tells of a kernel, and its price for each library call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isogemm.lab.profiler import KernelLaunch, ProfiledClock, _launch, _quiet, short_name

EVENT = {
    "cat": "kernel",
    "name": "gemm",
    "ts": 1.0,
    "dur": 12.5,
    "args": {
        "grid": [8, 4, 1],
        "block": [384, 1, 1],
        "registers per thread": 168,
        "shared memory": 214016,
        "est. achieved occupancy %": 19,
    },
}


def test_a_kernel_of_a_trace():
    found = _launch(EVENT)
    assert found == KernelLaunch("gemm", (8, 4, 1), (384, 1, 1), 168, 214016, pytest.approx(12.5e-6), 0.19)


def test_every_library_call_has_a_session_of_its_own(monkeypatch):
    profiler = pytest.importorskip("torch.profiler")
    log = []

    class Session:
        def __init__(self, activities):
            self.activities = activities

        def __enter__(self):
            log.append("begin")

        def __exit__(self, *error):
            log.append("end")

    class Loop:
        steps = (lambda i: log.append(("first", i)), lambda i: log.append(("second", i)))

    _quiet()  # which has a session, too
    monkeypatch.setattr(profiler, "profile", Session)
    clock = ProfiledClock(lambda: log.append("wait"), cuda=False)
    clock.elapsed(Loop(), 3, 1)
    assert log == ["wait", "begin", ("first", 3), "wait", "end", "begin", ("second", 3), "wait", "end"]
    log.clear()
    clock.elapsed(lambda i: log.append(i), 0, 2)
    assert log == ["wait", "begin", 0, "wait", "end", "begin", 1, "wait", "end"]


SESSIONS = """
import os, torch
from isogemm.lab.profiler import ProfiledClock, operators
ProfiledClock(lambda: None, cuda=False).elapsed(lambda i: torch.ones(3) + i, 0, 2)
print(*operators(lambda: torch.ones(3) + 1), "KINETO_LOG_LEVEL" in os.environ)
"""


def test_the_profilers_own_lines_do_not_bury_a_studys():
    pytest.importorskip("torch")
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    said = subprocess.run([sys.executable, "-c", SESSIONS], capture_output=True, text=True, env=environment, check=True)
    assert said.stderr == ""
    assert "aten::add" in said.stdout
    assert said.stdout.endswith(" False\n")  # the environment is as it was


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("void lt::splitKreduce_kernel<32, 16, int>(lt::P<float>, float*)", "lt::splitKreduce_kernel"),
        ("void cutlass::Kernel2<cutlass_80_sgemm_128x32>(cutlass_80_sgemm_128x32::P)", "cutlass_80_sgemm_128x32"),
        ("std::enable_if<!(false), void>::type gemvx::kernel<int, P<Q<int>>>(P<Q<int>>)", "gemvx::kernel"),
        ("nvjet_sm90_tst_64x8_64x16_1x2_h_bz_TNT", "nvjet_sm90_tst_64x8_64x16_1x2_h_bz_TNT"),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
    ],
)  # fmt: skip
def test_a_kernel_has_a_name_without_types(demangled, short):
    assert short_name(demangled) == short
