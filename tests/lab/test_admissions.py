"""``isogemm admissions``: what is on record is shown, what is no verdict is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.planner.fakes import FakeMachine
from typer.testing import CliRunner

from isogemm.cli import commands as cli
from isogemm.lab import admissions
from isogemm.planner.kernel_admission import Candidate, KernelAdmissions
from isogemm.planner.records import Records


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels tried on a pretended H200, a product's verdict as the planner keeps it, and rubbish."""
    found = KernelAdmissions(FakeMachine(), Records(tmp_path))
    for name, why in (("attention few", ""), ("rows_held softmax", "1 of 3 differ, first out[2] 0x1 for 0x0")):
        found.verdict(Candidate(name, "TX=1", "source", lambda machine, why=why: why, lambda: None))
    key = {"kernel": "stream", "code": "16x64; fma/chain", "fingerprint": "f", "stamp": found.stamp}
    Records(tmp_path).put(key, {"state": "admitted", "date": "2026-11-21", "detail": ""})
    Records(tmp_path).put({"arithmetic": "tensor_core", "stamp": found.stamp}, {"value": "tensor_core:sm90"})
    for name, text in (
        ("a", "{"),
        ("b", "[]"),
        ("c", '{"schema": "other", "key": {}, "value": {"state": "admitted"}}'),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.setattr(admissions, "folder", lambda: tmp_path)
    return tmp_path


def shown(*options: str) -> Any:
    done = CliRunner().invoke(cli.app, ["admissions", *options])
    assert done.exit_code == 0, done.output
    return done.output


def test_verdicts_are_shown_with_what_was_wrong(place):
    text = shown()
    assert "attention few  [TX=1]  on NVIDIA H200, driver 580.1" in text
    assert "stream  [16x64; fma/chain]" in text
    assert "1 of 3 differ, first out[2] 0x1 for 0x0" in text
    assert f"3 kernels on record in {place}, 1 of them refused" in text


def test_only_those_that_were_refused_and_as_json(place):
    (one,) = json.loads(shown("--refused", "--json"))
    assert (one["kernel"], one["state"], one["device"]) == ("rows_held softmax", "refused", "NVIDIA H200")


def test_nobodys_verdicts(tmp_path):
    assert list(admissions.read(tmp_path / "absent")) == []
