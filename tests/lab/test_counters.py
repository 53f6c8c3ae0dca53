"""Counters: what ncu prints, by a program in its place, and what is said where it may not run."""

from __future__ import annotations

import csv
import io

import pytest

from isogemm.errors import DeviceError
from isogemm.lab.counters import METRICS, read_counters

NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def printed(*launches):
    """A report of launches, each (range, value of all metrics)."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", NVTX, *METRICS.values()])
    writer.writerow(["", "", "", *["%"] * len(METRICS)])
    for i, (where, value) in enumerate(launches):
        writer.writerow([str(i), "gemm", f'"<default domain>":"{where}":none', *[value] * len(METRICS)])
    return "==PROF== Connected\nthe program says: 3\n" + out.getvalue()


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a program named ncu on the path that prints a text."""

    def put(text, status=0):
        (tmp_path / "said").write_text(text)
        tool = tmp_path / "ncu"
        tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/said\nexit {status}\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "asked"

    return put


def test_means_of_each_range(ncu):
    asked = ncu(printed(("loop torch", "1,020.5"), ("loop torch", "20.5"), ("strided torch", "7"), ("other", "9")))
    found = read_counters(["python", "program"], ["loop torch", "strided torch", "loop isogemm"])
    assert found == {
        "loop torch": dict.fromkeys(METRICS, pytest.approx(520.5)),
        "strided torch": dict.fromkeys(METRICS, 7.0),
    }
    words = asked.read_text().split()
    assert words[-2:] == ["python", "program"]
    assert words[words.index("--metrics") + 1].split(",") == list(METRICS.values())


def test_a_counter_that_the_gpu_lacks_is_missing(ncu):
    ncu(printed(("loop torch", "n/a")))
    assert read_counters(["x"], ["loop torch"]) == {"loop torch": {}}


def test_no_tool_and_no_permission_are_said(ncu, monkeypatch, tmp_path):
    ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", 1)
    with pytest.raises(DeviceError, match=r"ERR_NVGPUCTRPERM.*nearest legal choice: an administrator"):
        read_counters(["x"], ["loop torch"])
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(DeviceError, match="Nsight Compute"):
        read_counters(["x"], ["loop torch"])
