"""A table's kernels are admitted anew by one command: the rows stay, what is refused is left out and said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.fakes import FakeFamily, flip
from tests.planner.test_admission import LINEAR, VARIANTS
from tests.planner.test_tuning import UP, FakeBench, chooser, products
from tools.readmit import main

from isogemm.planner.tables import dump, load, shipped_tables
from isogemm.planner.trials import product_of, variant_of
from isogemm.planner.tuning import pose_key, readmit, tune
from isogemm.problem.numeric import numeric_key


def tuned() -> Any:
    f, library = FakeFamily("f", offered=("good", "bad")), FakeFamily("library", offered=("algo",))
    table, _ = tune(products(UP), (1, 64), chooser(f, library), FakeBench(lambda name, m: 1.0), name="t.json")
    return table


def test_new_sources_are_tried_and_the_rows_stay() -> None:
    table = tuned()
    f, library = FakeFamily("f", offered=("good", "bad"), source="v2"), FakeFamily("library", offered=("algo",))
    f.faults = {"bad": flip()}
    made, refused = readmit(table, chooser(f, library, driver="999"), FakeBench(lambda name, m: 1.0))
    assert made.rows == table.rows
    assert made.ceilings == table.ceilings
    assert made.stamp["driver"] == "999"
    assert {(x.fingerprint, x.configs) for x in made.admitted} == {("f-v2", ("good",))}
    assert [(x.low, x.high) for x in made.library] == [(x.low, x.high) for x in table.library]
    assert refused
    assert all(line.startswith("f [bad] for") for line in refused)


def test_a_library_that_differs_now_is_left_out() -> None:
    table = tuned()
    f, library = FakeFamily("f", offered=("good", "bad")), FakeFamily("library", offered=("algo",))
    made, refused = readmit(table, chooser(f, library), FakeBench(lambda name, m: 1.0, {"algo": 1}))
    assert not made.library
    assert all("library [algo]" in line for line in refused)


def test_families_that_are_gone_are_said() -> None:
    made, refused = readmit(tuned(), chooser(FakeFamily("g")), FakeBench(lambda name, m: 1.0))
    assert not made.admitted
    assert all("absent" in line or "library" in line for line in refused)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "t.json", tmp_path / "new.json"
    path.write_text(dump(tuned()))
    f, library = FakeFamily("f", offered=("good", "bad"), source="v2"), FakeFamily("library", offered=("algo",))
    prepared: list[Any] = []

    def opened(device: int) -> Any:
        return chooser(f, library), FakeBench(lambda name, m: 1.0), prepared.extend

    assert main([str(path), "--out", str(out)], opened) == 0
    assert load(path).admitted[0].fingerprint == "f-v1"
    assert load(out).admitted[0].fingerprint == "f-v2"
    assert {job[:2] for job in prepared} == {("f", "good"), ("f", "bad")}
    assert "0 refused" in capsys.readouterr().out
    assert main([str(path)], lambda device: (chooser(f, device="another"), None, None)) == 2


def test_rows_are_timed_anew_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    f, library = FakeFamily("f", offered=("good", "bad")), FakeFamily("library", offered=("algo",))

    def said(microseconds: float, *words: str) -> tuple[list[Any], str]:
        path.write_text(dump(tuned()))
        bench = FakeBench(lambda name, m: microseconds)
        assert main([str(path), *words], lambda device: (chooser(f, library), bench, lambda jobs: {})) == 0
        return [set(row.us.values()) for row in load(path).rows], capsys.readouterr().out

    before = [set(row.us.values()) for row in tuned().rows]
    assert said(2.0)[0] == before
    times, out = said(2.0, "--time", "60")
    assert times == [{2.0 * us for us in row} for row in before]
    assert f"{len(before)} of {len(before)} rows timed anew" in out
    assert said(2.0, "--time", "1e-9")[0] == before  # no time for any: they stay


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_s_text_gives_a_product_of_it(changes: dict[str, Any]) -> None:
    variant = variant_of(replace(LINEAR, **changes))
    assert variant_of(product_of(variant)) == variant


def test_every_shipped_table_can_be_admitted_anew() -> None:
    for table in shipped_tables():
        for entry in table.admitted:
            assert variant_of(product_of(entry.variant)) == entry.variant
        for row in table.rows:
            assert all(numeric_key(pose_key(row.key, m)) == row.key for m in row.us)
        for entry in table.library:
            assert variant_of(pose_key(entry.key, entry.high)) == entry.variant


def test_a_text_that_is_no_variant() -> None:
    with pytest.raises(ValueError, match="no variant"):
        product_of("fma/chain float32*float32>float32 NN>N align=128/16 batched alpha")
