"""The benchmark of whole models at tiny sizes: a part runs, is limited, and keeps its rows."""

from __future__ import annotations

import pytest
from benchmarks.models import __main__ as models
from benchmarks.models.ledger import Ledger, Sizes
from tests.benchmarks.commands import invoke

from isogemm.lab import read_json

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("part", ["backward", "prefill"])
def test_a_part_writes_its_rows(tmp_path, part):
    out = tmp_path / "rows.json"
    result = invoke(models.main, "--tiny", "--device", "cpu", "--parts", part, "--out", out)
    assert result.exit_code == 0, result.output
    (row,) = read_json(out)["rows"]
    assert row["error"] is None
    assert row["differing"] == 0 < row["checked"]
    assert row["verdicts"][0]["ours"] == "isogemm"


def test_errors_and_the_limit_of_a_part_are_rows(tmp_path):
    def endless():
        while True:
            pass

    def broken():
        raise ValueError("no such thing")

    ledger = Ledger(tmp_path / "rows.json", Sizes("cpu", True), {})
    ledger.part("some", iter([("broken", broken), ("fine", lambda: {"differing": 0})]), 60.0)
    ledger.part("short", iter([("endless", endless), ("late", dict)]), 0.3)
    found = [(row["name"], row["error"]) for row in read_json(ledger.path)["rows"]]
    assert found[:2] == [("broken", "ValueError: no such thing"), ("fine", None)]
    assert found[2:] == [("endless", "the part's time was over"), ("the rest", "the part's 0.3 s were over")]


def test_cases_that_are_asked_for_in_their_order():
    known = [(name, dict) for name in ("a, eager", "b, eager", "a, captured")]
    assert list(models._named(iter(known), None)) == known
    assert [name for name, _ in models._named(iter(known), ["captured", "a,"])] == ["a, captured", "a, eager"]
