"""What the benchmarks share: draws that repeat, and groups of cells that are held against bars."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from benchmarks.common import Group, groups_text, measured, selected, summarize, told
from benchmarks.cpu import cases as cpu
from benchmarks.cpu.cases import Case
from benchmarks.cpu.operands import build
from benchmarks.draw import of_cpus, of_gpus
from benchmarks.gpu import cases as gpu
from benchmarks.model import cases as model
from tests.process import ROOT, python

from benchmarks import readme
from isogemm import lab
from isogemm.lab import Timing, rotation, verdict

ALL = Group("all", "them", lambda row: True, 1.0, low=0.9, least=0.5)


@pytest.mark.parametrize("of", [of_cpus, of_gpus])
def test_a_draw_repeats_and_a_longer_one_begins_with_it(of):
    assert of(3, 20) == of(3, 50)[:20] != of(4, 20)


SUITES = {
    "cpu": (cpu.cases, [*cpu.SUITES, cpu.RANDOM]),
    "gpu": (gpu.cases, [*gpu.SUITES, gpu.RANDOM]),
    "model": (model.cases, list(model.SUITES)),
}


@pytest.mark.parametrize(("cases", "suites"), SUITES.values(), ids=SUITES)
def test_names_are_unique_so_that_a_repeat_command_means_one_case(cases, suites):
    every = cases(suites)
    assert len({case.name for case in every}) == len(every)
    for case in every:
        assert selected(cases([case.suite]), " ".join(case.words[1:])) == [case]


def test_every_section_of_the_page_has_its_marks_once():
    text = readme.PAGE.read_text()
    assert all(text.count(edge) == 1 for _, mark, _ in readme.SECTIONS for edge in readme.marks(mark))


def test_hot_weights_are_one_matrix_and_cold_ones_many(monkeypatch):
    monkeypatch.setattr(rotation, "last_level_cache", lambda: 2**20)  # hundreds of megabytes are some CPU's
    hot, cold = (build(Case("random", "linear", 2, 9, 7, layout="NT", rotated=x), ("numpy",), 1) for x in (False, True))
    assert hot.operands == "in cache"
    assert "rotated over" in cold.operands


def test_what_is_drawn_for_gpus_is_in_the_shares_that_are_said():
    drawn = of_gpus(1, 4000)
    assert all(512 <= x <= 32768 for d in drawn for x in (d.n, d.k))
    assert all(1 <= d.m <= 8192 for d in drawn)

    def share(holds):
        return sum(map(holds, drawn)) / len(drawn)

    assert share(lambda d: d.n % 64 == d.k % 64 == 0) == pytest.approx(0.8, abs=0.03)
    assert share(lambda d: d.dtype == "bfloat16") == pytest.approx(0.6, abs=0.03)
    assert share(lambda d: d.dtype == "float32") == pytest.approx(0.2, abs=0.03)
    assert share(lambda d: d.layout == "NT") == pytest.approx(0.8, abs=0.03)
    assert share(lambda d: d.bias) == pytest.approx(0.2, abs=0.03)
    assert share(lambda d: d.m <= math.sqrt(8192)) == pytest.approx(0.5, abs=0.03)


def test_what_is_drawn_for_cpus_is_in_the_shares_that_are_said():
    drawn = of_cpus(1, 4000)
    assert all(128 <= x <= 4096 for d in drawn for x in (d.n, d.k))
    assert sum(d.m == 1 for d in drawn) / len(drawn) == pytest.approx(0.38, abs=0.05)  # the draw of M gives some too
    assert sum(d.cold for d in drawn) == len(drawn) / 2
    assert {d.dtype for d in drawn} == {"float32"}


@pytest.mark.parametrize(
    ("ratios", "result"),
    [
        ([1.0] * 40, "MET"),
        ([1.2] * 38 + [0.6] * 2, "MET"),  # the 5th percentile is the third of 40
        ([1.2] * 37 + [0.6] * 3, "NOT MET"),
        ([1.2] * 39 + [0.4], "NOT MET"),
        ([0.95] * 40, "NOT MET"),
        ([], "NOT MEASURED"),
    ],
)
def test_a_group_is_met_when_all_of_its_bars_are(ratios, result):
    (found,) = summarize([{"ratio": x} for x in ratios], [ALL], lambda row, peer: row["ratio"])
    assert found["result"] == result
    assert found["cells"] == len(ratios)
    assert ("(bars 1, 0.9, 0.5: " in groups_text([found]).plain) == bool(ratios)


def test_ratios_are_of_the_samples_whatever_a_file_says(tmp_path):
    times = {"ours": Timing.of("ours", [1.0, 2.0, 4.0], 1), "peer": Timing.of("peer", [3.0, 4.0, 4.0], 1)}
    row = lab.row("a", command="", timings=times, verdicts=[verdict(times["ours"], times["peer"])])
    row["verdicts"][0] |= {"ratio": 9.0, "low": 8.0, "word": "EQUAL"}
    lab.write_json(tmp_path / "r.json", [row, lab.row("b", command="", timings={})], environment={})
    first, last = measured(tmp_path / "r.json")["rows"]
    assert first["verdicts"] == [asdict(verdict(times["ours"], times["peer"]))]
    assert first["verdicts"][0]["ratio"] == 2.0
    assert last["verdicts"] == []


def test_options_in_words():
    assert told(tuned=True, bare=False, peers=None, count=3, only="a b") == ("--tuned", "--count", "3", "--only", "a b")


def test_help_starts_without_torch():
    mains = [f"benchmarks.{path.parent.name}.__main__" for path in (ROOT / "benchmarks").glob("*/__main__.py")]
    modules = [*mains, "benchmarks.first_calls", "benchmarks.program", "benchmarks.program_bits", "benchmarks.readme"]
    assert len(mains) >= 8
    assert python("-c", f"import sys, {', '.join(modules)}; print('torch' in sys.modules)").strip() == "False"
