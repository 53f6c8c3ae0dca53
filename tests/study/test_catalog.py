"""Every study, quickly, on this CPU; and the numbers that they start from."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from isogemm.lab import Ceilings, Work, limit_threads
from isogemm.study.catalog import STUDIES, study
from isogemm.study.catalog.attention import intensity, work
from isogemm.study.catalog.four_methods import METHODS, works
from isogemm.study.catalog.prefill import saturation
from isogemm.study.catalog.why import resident
from isogemm.study.charts import measured
from isogemm.study.engine import RunOptions, StudyRun, run
from isogemm.study.page import page
from isogemm.study.site import open_site


@pytest.fixture(scope="module")
def site():
    """One thread of this CPU by one short clock, with a small cache, so that few copies rotate."""
    found = open_site("cpu", ceilings=False)
    limits = {"fp32": Ceilings(1, 2e10, 1e11)}
    with limit_threads(1):  # threads of several libraries that spin for each other's cores take most of the time
        yield replace(found, cache=1 << 20, ceilings=limits, clocks={"wall": found.clocks["wall"]})


@pytest.fixture(scope="module", params=list(STUDIES))
def finished(request, site) -> StudyRun:
    return run(study(request.param), site, RunOptions(quick=True))


def test_every_row_is_correct(finished):
    assert finished.rows
    for row in finished.rows:
        assert row["error"] is None, row["name"]
        assert not row["absent"], row["name"]
        for way, found in row["correctness"].items():
            assert not found["differing"], (row["name"], way)
            if found["contract"]:
                assert found["from_first"] == 0, (row["name"], way)


def test_every_figure_says_a_finding(finished):
    for figure in study(finished.study).figures(measured(finished.rows)):
        assert figure.title
        assert figure.sentence
        assert (figure.chart is not None) or figure.table or "not measured" in figure.title


def test_the_page_holds_every_command_and_finding(finished):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    from html import unescape

    text = unescape(page([finished]))
    assert len(text) < 2_000_000
    for row in finished.rows:
        assert row["command"] in text
    for figure in study(finished.study).figures(measured(finished.rows)):
        assert figure.title in text


def test_a_row_replays_by_its_command(finished, site):
    words = shlex.split(finished.rows[0]["command"])
    case, seed = words[words.index("--case") + 1], int(words[words.index("--seed") + 1])
    again = run(study(words[2]), site, RunOptions("--quick" in words, seed, case)).rows
    assert [row["command"] for row in again] == [finished.rows[0]["command"]]
    for part in ("facts", "correctness", "work", "kernel"):
        assert again[0][part] == finished.rows[0][part]


@pytest.mark.parametrize("name", ["pointers", "modes"])
def test_without_torch_numpy_and_isogemm_run_alone(site, name):
    found = run(study(name), replace(site, torch=False), RunOptions(quick=True))
    assert all(row["error"] is None and row["timings"] for row in found.rows)
    assert not [way for row in found.rows for way in row["timings"] if "torch" in way]


@pytest.mark.parametrize(("n", "k"), [(64, 2), (1024, 16), (2560, 7)])
def test_the_four_methods_do_equal_work(n, k):
    found = works(n, k)
    assert set(found) == set(METHODS)
    assert {each.flops for each in found.values()} == {2 * k * n**3}
    assert found["wide"].nbytes == 4 * (2 * k + 1) * n**2
    assert {found[method].nbytes for method in METHODS[1:]} == {4 * 3 * k * n**2}


def test_the_eight_intensities_of_attention():
    sizes = [1024 * 2**e for e in range(8)]
    found = [round(intensity("training", tokens, itemsize=2), 2) for tokens in sizes]
    assert found == [102.4, 113.78, 120.47, 124.12, 126.03, 127.01, 127.5, 127.75]
    for tokens in sizes:
        assert intensity("training", tokens, itemsize=2) == pytest.approx(128 * tokens / (256 + tokens))
        assert intensity("training", tokens, itemsize=4) == pytest.approx(64 * tokens / (256 + tokens))
        assert intensity("decode", tokens, itemsize=2) == pytest.approx(128 * tokens / (128 + 129 * tokens))
    assert round(intensity("decode", 1024, itemsize=2), 2) == 0.99


def test_values_do_as_much_as_scores():
    for phase in ("training", "decode"):
        scores, values = (work(phase, product, 4096, itemsize=2, heads=3) for product in ("scores", "values"))
        assert scores == values
    assert work("decode", "scores", 4096, itemsize=2) == Work(2 * 128 * 4096, 2 * (128 + 129 * 4096))


def test_saturation_is_the_first_to_reach_nine_tenths():
    assert saturation({1: 10.0, 16: 80.0, 64: 95.0, 256: 100.0}) == 64
    assert saturation({1: 100.0, 16: 99.0}) == 1


@pytest.mark.parametrize(
    ("registers", "shared", "block", "expected"),
    [
        (32, 0, (256, 1, 1), (8, "threads")),
        (168, 0, (384, 1, 1), (1, "registers")),
        (64, 100 << 10, (128, 1, 1), (2, "shared memory")),
        (16, 0, (32, 1, 1), (32, "blocks")),
    ],
)
def test_what_a_multiprocessor_holds(registers, shared, block, expected):
    hopper = {"threads": 2048, "registers": 65536, "shared": 233472, "blocks": 32}
    assert resident({"registers": registers, "shared": shared, "block": block}, hopper) == expected
