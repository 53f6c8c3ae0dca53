"""The benchmark of programs: a tiny step has isogemm.torch's gradients, and its row says what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.program import main
from tests.benchmarks.commands import invoke

from benchmarks import program_bits

pytest.importorskip("transformers")


def test_a_row_has_bits_ratios_and_bars(tmp_path):
    path = tmp_path / "rows.json"
    words = ["--divide", "8", "--batch", "2", "--tokens", "8", "--blocks", "1", "--threads", "1", "--json"]
    result = invoke(main, *words, path)
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
    path = tmp_path / "rows.json"
    words = ["--tokens", "4", "--steps", "2", "--drawn", "1", "--json", path]
    result = invoke(program_bits.main, *words)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 6
    assert all(row["checked"] for row in rows)
    assert not any(row["differing"] for row in rows)
    formula = program_bits.adamw
    monkeypatch.setattr(program_bits, "adamw", lambda w, *rest: formula(w * np.float32(1 + 2**-22), *rest))
    assert invoke(program_bits.main, *words).exit_code == 1
