"""The engine of studies: clocks that nest, rows that are kept and repeated, memory asked for beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.study import fakes

from isogemm.errors import LimitError, OptionError
from isogemm.lab import read_json
from isogemm.study.catalog import STUDIES
from isogemm.study.catalog import study as named
from isogemm.study.engine import SCHEMA, RunOptions, run


@pytest.fixture
def queue(monkeypatch):
    found = fakes.Queue()
    monkeypatch.setattr("isogemm.lab.clock.time", found.time)
    return found


def median(row, clock, way):
    timings = row["timings"] if clock == row["clock"] else row["clocks"][clock]
    return timings[way]["median"]


@pytest.mark.parametrize("seconds", [1e-6, 1e-4], ids=["shorter than a launch", "longer than a launch"])
def test_clocks_nest(queue, seconds):
    found = run(fakes.study(queue, seconds=seconds), fakes.site(queue))
    for row in found.rows:
        for way in ("batch", "loop"):
            submit, device, wall = (median(row, clock, way) for clock in ("submit", "device", "wall"))
            assert submit <= wall * (1 + 1e-9)
            assert device <= wall * (1 + 1e-9)
    last = found.rows[-1]
    assert median(last, "submit", "loop") == pytest.approx(3 * median(last, "submit", "batch"))
    assert median(last, "device", "loop") == pytest.approx(median(last, "device", "batch"))


def test_a_clock_of_submissions_leaves_a_slow_device_little_to_do(queue):
    found = run(fakes.study(queue, seconds=0.05, sizes=(1,)), fakes.site(queue))
    assert set(found.rows[0]["clocks"]) == {"wall", "submit"}
    assert found.rows[0]["clocks"]["submit"]["batch"]["calls"] == 1
    assert found.rows[0]["seconds"].keys() == {"made", "called", "checked", "named", "device", "wall", "submit"}
    calls_of_both_ways = queue.worked / 0.05
    assert calls_of_both_ways <= 2 * (3 * 7 + 3)  # rounds of three clocks, and three calls before


def test_a_row_has_all_that_is_needed_to_judge_and_repeat_it(queue):
    row = run(fakes.study(queue), fakes.site(queue), RunOptions(quick=True, seed=3, case="k=2")).rows[0]
    assert row["command"] == "isogemm study fake --device cpu --seed 3 --quick --case k=2"
    assert row["seed"] == 3
    assert row["kernel"] == {"batch": "one", "loop": "many"}
    assert row["correctness"]["loop"]["differing"] == 0
    assert row["work"]["loop"] == {"flops": 2000, "nbytes": 20}
    assert {"median", "p5", "p95", "samples", "gflop_per_second"} <= set(row["timings"]["batch"])
    assert [(v["ours"], v["peer"]) for v in row["verdicts"]] == [("batch", "loop")]


def test_a_run_that_was_stopped_goes_on(queue, tmp_path):
    def stop(k):
        if k == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(fakes.study(queue, fails=stop), fakes.site(queue), folder=tmp_path)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line).get("name") for line in lines] == [None, "k=1"]
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"name": "k=2", "tim')  # stopped while a row was written
    made = []
    for _ in range(2):
        found = run(fakes.study(queue, fails=made.append), fakes.site(queue), folder=tmp_path)
        assert made == [2, 3]
    assert [row["name"] for row in found.rows] == ["k=1", "k=2", "k=3"]
    assert read_json(tmp_path / "fake.json", schema=SCHEMA)["rows"] == found.rows


def test_a_row_is_begun_where_it_is_expected_to_end_in_time(queue, monkeypatch):
    monkeypatch.setattr("isogemm.study.engine.time", SimpleNamespace(monotonic=lambda: queue.now))
    declared = fakes.study(queue, seconds=1.0)
    took = [sum(row["seconds"].values()) for row in run(declared, fakes.site(queue)).rows]
    for share, left_out in ((0.9, ["k=3"]), (1.1, [])):
        found = run(declared, fakes.site(queue), limit=took[0] + (1 + share) * took[1])
        assert list(found.left_out) == left_out


def test_what_a_first_row_pays_once_is_not_expected_of_the_next(queue, monkeypatch):
    monkeypatch.setattr("isogemm.study.engine.time", SimpleNamespace(monotonic=lambda: queue.now))

    def compiles(k):
        queue.now += 1000.0 if k == 1 else 0.0

    found = run(fakes.study(queue, fails=compiles), fakes.site(queue), limit=1100.0)
    assert [row["name"] for row in found.rows] == ["k=1", "k=2", "k=3"]
    assert found.rows[0]["seconds"]["made"] == 1000.0


@pytest.mark.parametrize("options", [RunOptions(seed=1), RunOptions(quick=True)])
def test_rows_of_another_run_are_refused(queue, tmp_path, options):
    run(fakes.study(queue), fakes.site(queue), folder=tmp_path)
    with pytest.raises(OptionError, match=r"rows of another options.*nearest legal choice: another --out"):
        run(fakes.study(queue), fakes.site(queue), options, tmp_path)


def test_rows_of_another_machine_or_study_are_refused(queue, tmp_path):
    run(fakes.study(queue), fakes.site(queue), folder=tmp_path)
    with pytest.raises(OptionError, match="rows of another machine"):
        run(fakes.study(queue), replace(fakes.site(queue), name="another"), folder=tmp_path)
    with pytest.raises(OptionError, match="rows of another study"):
        run(replace(fakes.study(queue), name="other"), fakes.site(queue), folder=tmp_path)


def test_what_memory_does_not_hold_is_left_out_and_said(queue):
    found = run(fakes.study(queue), fakes.site(queue, memory=int(2.6 * 2**20)))
    assert [row["name"] for row in found.rows] == ["k=1", "k=2"]
    assert list(found.left_out) == ["k=3"]
    with pytest.raises(LimitError, match=r"memory for k=3.*nearest legal choice: --case 'k=2'"):
        run(fakes.study(queue), fakes.site(queue, memory=int(2.6 * 2**20)), RunOptions(case="k=3"))
    with pytest.raises(LimitError, match=r"memory for k=1.*GiB free"):
        run(fakes.study(queue), fakes.site(queue, memory=1 << 10))


def test_an_unknown_case_or_study_is_refused_with_the_nearest(queue):
    with pytest.raises(OptionError, match="nearest legal choice: k=2"):
        run(fakes.study(queue), fakes.site(queue), RunOptions(case="k=22"))
    with pytest.raises(OptionError, match="nearest legal choice: four-methods"):
        named("four-method")


def test_a_way_that_fails_is_named_and_the_others_are_timed(queue):
    def out_of_memory(k):
        if k == 1:
            raise RuntimeError("out of memory\nand more")

    rows = run(fakes.study(queue, fails=out_of_memory), fakes.site(queue)).rows
    assert rows[0]["error"] == "RuntimeError: out of memory"
    assert rows[0]["timings"] == {}
    assert rows[1]["error"] is None


def test_a_way_that_cannot_be_called_is_absent_and_all_others_are_judged(queue):
    declared = fakes.study(queue, sizes=(1,))
    (case,) = declared.cases(None, False)

    def made(site, seed):
        found = case.make(site, seed)
        broken = replace(found.ways["loop"], steps=[lambda i: 1 / 0])
        ways = found.ways | {"broken": broken, "again": found.ways["batch"]}
        return replace(found, ways=ways, check=dict)

    found = run(replace(declared, cases=lambda site, quick: [replace(case, make=made)]), fakes.site(queue))
    assert found.rows[0]["absent"] == {"broken": "ZeroDivisionError: division by zero"}
    assert [v["peer"] for v in found.rows[0]["verdicts"]] == ["loop", "again"]


def test_every_study_is_named_as_it_is_listed():
    assert [named(name).name for name in STUDIES] == list(STUDIES)
