"""The benchmark of programs: a tiny step has isogemm.torch's gradients, and its row says what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.program import main
from typer import Typer
from typer.testing import CliRunner

from benchmarks import program_bits

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


def test_every_plan_s_bits_are_compared(tmp_path, monkeypatch):
    """On one choice of each kind, and on an optimizer that is not the formula's."""
    for name, some in (("THREADS", (1, 3)), ("MICRO_BATCHES", (1, 8)), ("MODES", ("fast",)), ("RECOMPUTE", (True,))):
        monkeypatch.setattr(program_bits, name, some)
    monkeypatch.setattr(program_bits, "MODEL", replace(program_bits.MODEL, vocab_size=64, hidden_size=32))
    app, path = Typer(), tmp_path / "rows.json"
    app.command()(program_bits.main)
    words = ["--tokens", "4", "--steps", "2", "--drawn", "1", "--json", str(path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 6
    assert all(row["checked"] for row in rows)
    assert not any(row["differing"] for row in rows)
    formula = program_bits.adamw
    monkeypatch.setattr(program_bits, "adamw", lambda w, *rest: formula(w * np.float32(1 + 2**-22), *rest))
    assert CliRunner().invoke(app, words).exit_code == 1
