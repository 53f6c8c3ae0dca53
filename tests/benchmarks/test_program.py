"""The benchmark of programs: a tiny step has isogemm.torch's gradients, and its row says what was measured."""

from __future__ import annotations

import json

import pytest
from benchmarks.program import main
from typer import Typer
from typer.testing import CliRunner

pytest.importorskip("transformers")


def test_a_row_has_bits_ratios_and_bars(tmp_path):
    app, path = Typer(), tmp_path / "rows.json"
    app.command()(main)
    words = ["--divide", "8", "--batch", "2", "--tokens", "8", "--blocks", "1", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, [*words, str(path)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["correctness"]["differing"] == 0 < row["correctness"]["checked"]
    assert list(row["timings"]) == ["program", "isogemm.torch", "torch"]
    assert len(row["bars"]) == 4
    assert {"forward", "backward", "optimizer", "canaries"} <= row["phases"].keys()
    assert row["memory"]["lower_bound"] <= row["memory"]["bytes"]
