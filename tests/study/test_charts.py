"""What is for looking: every name of a legend looks like no other, and numbers are written as people write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isogemm.study.catalog import study
from isogemm.study.charts import COLOURS, lines, measured, number
from isogemm.study.page import read_runs

pytest.importorskip("altair")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("count", [3, len(COLOURS), len(COLOURS) + 1, 3 * len(COLOURS)])
def test_no_two_lines_look_alike(count):
    data = [{"x": x, "y": x + i, "way": f"way {i}"} for i in range(count) for x in (1, 2)]
    encoding = lines(data, "x", "y", titles=("x", "y")).to_dict()["encoding"]
    scales = [encoding[channel]["scale"] for channel in ("color", "shape", "strokeDash") if channel in encoding]
    assert all(scale["domain"] == [f"way {i}" for i in range(count)] for scale in scales)
    for kinds in (scales, scales[:2]):  # a line of one point has no dashes
        looks = {tuple(map(str, look)) for look in zip(*(scale["range"] for scale in kinds), strict=True)}
        assert len(looks) == count
    assert ("shape" in encoding) == (count > len(COLOURS))


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.01234, 3, "0.0123"),
        (999.6, 3, "1,000"),
        (5271.0, 3, "5,270"),
        (110123.0, 4, "110,100"),
        (-2000.4, 4, "-2,000"),
    ],
)
def test_numbers_have_no_powers_of_ten(value, digits, text):
    assert number(value, digits) == text


def test_no_finding_that_is_kept_here_has_a_power_of_ten():
    runs = read_runs(sorted({path.parent for path in RESULTS.glob("studies-*/*.json")}))
    found = [figure for run in runs for figure in study(run.study).figures(measured(run.rows))]
    words = [f"{f.title} {f.sentence} {' '.join(str(v) for row in f.table for v in row.values())}" for f in found]
    assert len(words) > 100
    assert [re.findall(r"\S*\de\+\d\S*", text) for text in words if re.search(r"\de\+\d", text)] == []
