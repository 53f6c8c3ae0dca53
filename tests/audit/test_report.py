"""The report as JSON and as a page, and the inputs that a user hands over: shapes, weights, activations."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from isogemm import audit
from isogemm.audit import words
from isogemm.audit.cases import ULP_BINS, median_ulps
from isogemm.audit.console import print_report
from isogemm.audit.data import portable
from isogemm.audit.html import page
from isogemm.errors import OptionError, ShapeError
from isogemm.lab.models import MODELS, LinearShape, model
from isogemm.lab.page import theme

from . import fakes

SHAPE = LinearShape("fake", fakes.N, fakes.K)
RELATION_KEYS = {
    *("relation", "meaning", "status", "cases", "held", "changed", "failed", "not_applicable"),
    *("outputs", "changed_outputs", "max_ulp", "reason", "drifts"),
}
DRIFT_KEYS = {
    *("provider", "relation", "params", "shape", "m", "dtype", "seed", "row", "column"),
    *("expected_bits", "got_bits", "expected", "got", "ulps", "kernels", "replay"),
}


@pytest.fixture(scope="module")
def report() -> audit.Report:
    return audit.run([fakes.by_m, fakes.honest, fakes.raises, fakes.not_finite], [SHAPE], require=[], sweep=[1, 2, 16])


def test_a_report_prints_as_the_command_does(report: audit.Report) -> None:
    console = Console(file=io.StringIO(), width=120)
    print_report(report, console)
    assert str(report) == console.file.getvalue().strip()
    assert repr(report).startswith("Report(")
    assert "by_m changed" in repr(report)
    assert len(repr(report)) < 300


def test_json_round_trip_and_schema(report: audit.Report, tmp_path: Path) -> None:
    path = report.write_json(tmp_path / "deep" / "report.json")
    content = json.loads(path.read_text())
    assert content == json.loads(json.dumps(report.to_dict()))
    assert content["schema"] == "isogemm.audit.v1"
    assert set(content) == {
        *("schema", "ok", "required", "options", "shapes", "providers", "speeds", "notes", "environment")
    }
    for provider in content["providers"]:
        assert set(provider) == {*("name", "status", "reason", "relations", "agreement", "histogram", "relative_error")}
        for relation in provider["relations"]:
            assert set(relation) == RELATION_KEYS
            assert relation["cases"] == relation["held"] + relation["changed"] + relation["failed"]
            assert all(set(drift) == DRIFT_KEYS for drift in relation["drifts"])
            assert bool(relation["changed_outputs"]) == bool(relation["drifts"])
    population = content["providers"][0]["relations"][0]
    assert population["drifts"][0]["replay"].endswith(
        "isogemm audit --replay 'provider=tests.audit.fakes:by_m&relation=population&m=2&against=1"
        f"&n={fakes.N}&k={fakes.K}&dtype=float32&seed=0'"
    )
    assert content["shapes"] == [
        {"name": "fake", "n": fakes.N, "k": fakes.K, "source": "random", "columns_compared": fakes.N, "largest_m": 16}
    ]


def test_speeds_are_relative_to_the_fastest(report: audit.Report) -> None:
    assert {s.m for s in report.speeds} == {1, 16, 128}
    assert "tests.audit.fakes:raises" not in {s.provider for s in report.speeds}
    for m in (1, 16, 128):
        ratios = [s.against_fastest for s in report.speeds if s.m == m]
        assert min(ratios) == 1.0
        assert all(s.p5 <= s.median <= s.p95 for s in report.speeds)


def test_page_is_one_file(report: audit.Report, tmp_path: Path) -> None:
    text = report.write_html(tmp_path / "report.html").read_text()
    markup = re.sub(r"<script>.*?</script>", "<script></script>", text, flags=re.DOTALL)
    assert markup.count("<script></script>") == 2
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b", markup)
    assert not re.search(r"\b(src|href)\s*=|@import|url\(", markup)
    assert "http://" not in markup
    assert "https://" not in markup
    assert not re.search(r"$\w", markup)
    for name in ("agreement", "drift", "speed"):
        assert f'<div id="{name}" class="chart">' in markup
        assert f'"{name}": {{' in text
    for word in (
        "tests.audit.fakes:by_m",
        "bits changed",
        "raised RuntimeError",
        "isogemm audit --replay",
        "population",
    ):
        assert word in markup


def test_charts_render(report: audit.Report) -> None:
    import vl_convert

    from isogemm.audit import figures

    for make in (figures.agreement_map, figures.drift_histogram, figures.speed_bars):
        spec = make(report).to_dict()
        for dark in (False, True):
            spec["config"] = theme(dark=dark)
            svg = vl_convert.vegalite_to_svg(spec)
            assert svg.count("<path") > 10


def test_page_says_what_a_name_is_not_markup() -> None:
    evil = audit.CallableProvider("<b>&</script>", fakes.by_m)
    text = page(audit.run([evil], [SHAPE], require=[], sweep=[1, 2], speed=False))
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "</script" not in markup  # the name in the figures' data ended no script
    assert "<b>&" not in markup
    assert "&lt;b&gt;&amp;" in markup


def test_drifts_of_ones_own_function_name_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "my own.py").write_text(
        "import numpy as np\n\n\ndef f(x, w):\n    return x @ w.T * np.float32(1 + len(x) * 2.0**-20)\n"
    )
    name = f"{tmp_path}/my own.py:f"
    found = audit.run([name], [SHAPE], require=[], sweep=[1, 2], speed=False)
    command = words.examination(next(iter(found.providers)))
    assert shlex.split(command)[:4] == ["isogemm", "doctor", "--call", name]
    assert command in str(found)
    assert "isogemm doctor --call " in page(found)
    assert words.examination("numpy") == ""


def test_page_without_drift_or_speed_says_so() -> None:
    text = page(audit.run([fakes.honest], [SHAPE], require=[], sweep=[1, 2], speed=False))
    assert "No output changed, so there is no distance to show." in text
    assert "Speed was not measured." in text


def test_missing_extra_is_named(report: audit.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(OptionError, match=r"isogemm\[report\]"):
        report.write_html(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_shapes_of_json_and_csv(tmp_path: Path) -> None:
    texts = {
        "a.json": '[{"n": 8, "k": 4, "name": "up"}, [6, 5], [3, 2, "down"]]',
        "a.csv": "# comment\nname,k,n\nup,4,8\n6x5,5,6\ndown,2,3\n",
        "b.csv": "8,4,up\n\n6, 5\n3,2,down\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        linears = [source.linear for source in audit.read_shapes(str(tmp_path / name))]
        assert linears == [("up", 8, 4), ("6x5", 6, 5), ("down", 3, 2)], name


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[[1]]", "[[0, 4]]", "[[-1, 4]]", "[[1.5, 4]]", "[[true, 4]]", "8", "8,x", "n,k\n", '["88"]'],
)
def test_malformed_shapes(text: str, tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text(text)
    with pytest.raises(ShapeError):
        audit.read_shapes(str(tmp_path / "shapes"))


def test_shapes_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("[[1, 2]")
    for name in ("broken.json", "absent.json"):
        with pytest.raises(OptionError):
            audit.read_shapes(str(tmp_path / name))


@pytest.fixture
def weights(tmp_path: Path) -> str:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {
        "layer.0.up.weight": rng.standard_normal((20, 12)).astype(ml_dtypes.bfloat16),
        "layer.0.bias": np.zeros(20, np.float32),
        "layer.1.down[x].weight": rng.standard_normal((6, 9)).astype(np.float32),
        "ids": np.zeros((2, 2), np.int64),
    }
    path = tmp_path / "a model + more & so on=%20.safetensors"
    save_file(tensors, str(path))
    return str(path)


def test_weights_of_a_file(weights: str) -> None:
    sources = {s.linear.name: s for s in audit.weights_of_file(weights)}
    assert {(s.linear.n, s.linear.k) for s in sources.values()} == {(20, 12), (6, 9)}
    assert len(audit.weights_of_file(weights, limit=1)) == 1
    assert [s.linear.n for s in audit.weights_of_file(weights, match=["*.1.*"])] == [6]
    stored = np.random.default_rng(0).standard_normal((20, 12)).astype(ml_dtypes.bfloat16)
    up = sources["layer.0.up.weight"].load(np.dtype(np.float32), 0)
    np.testing.assert_array_equal(up, stored.astype(np.float32))
    assert up.dtype == np.float32
    with pytest.raises(OptionError, match="no matching"):
        audit.weights_of_file(weights, match=["nothing*"])
    with pytest.raises(OptionError, match="cannot read"):
        audit.weights_of_file(weights + ".not")


def test_audit_of_real_weights_and_activations_replays(weights: str, tmp_path: Path) -> None:
    inputs = str(tmp_path / "x.npy")
    np.save(inputs, np.random.default_rng(1).standard_normal((10, 9)).astype(np.float32))
    sources = audit.weights_of_file(weights, match=["*down*"])
    report = audit.run([fakes.by_m], sources, require=[], inputs=inputs, sweep=[1, 2, 64], speed=False)
    drift = report.drifts("tests.audit.fakes:by_m")[0]
    case, outcome = audit.replay(drift.case.text())
    assert case == drift.case
    assert outcome.drift == drift
    with pytest.raises(ShapeError, match="activations"):
        audit.run([fakes.by_m], [SHAPE], require=[], inputs=inputs, sweep=[1, 2], speed=False)


def test_models_have_the_published_shapes() -> None:
    assert len(MODELS) == 8
    small = {name: (n, k) for name, n, k in model("Qwen2.5-0.5B").linears()}
    assert small == {
        "qkv": (1152, 896),
        "attention output": (896, 896),
        "gate+up": (9728, 896),
        "down": (896, 4864),
        "lm head": (151936, 896),
    }
    medium = {name: (n, k) for name, n, k in model("qwen3 4b").linears()}
    assert medium["qkv"] == (6144, 2560)
    assert medium["attention output"] == (2560, 4096)  # head_dim is not hidden / heads
    assert medium["gate+up"] == (19456, 2560)
    assert medium["down"] == (2560, 9728)
    assert LinearShape("expert down", 2048, 768) in model("Qwen3-30B-A3B").linears()
    with pytest.raises(OptionError, match="Qwen3-4B"):
        model("Qwen3-4C")


def printed(report: audit.Report) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(report, console)
    return console.export_text()


def test_paths_below_the_current_folder_are_relative_and_the_page_shows_names(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((10, 9), np.float32) / 3)
    sources = audit.weights_of_file(weights, match=["*down*"])
    report = audit.run([fakes.by_m], sources, inputs=str(tmp_path / "x.npy"), sweep=[1, 2], speed=False)
    line = report.drifts("tests.audit.fakes:by_m")[0].case.text()
    assert str(tmp_path) not in line
    assert audit.replay(line)[1].drift is not None
    markup = re.sub(r"<script>.*?</script>|<dl>.*?</dl>", "", page(report), flags=re.DOTALL)
    assert str(tmp_path) not in markup
    assert "weights of a model + more &amp; so on=%20.safetensors, activations x.npy" in markup
    monkeypatch.chdir("/")
    assert portable(weights) == weights.removeprefix("/")
    monkeypatch.chdir(sys.prefix)
    assert portable(weights) == weights


def test_a_page_is_written_whatever_a_linear_is_called(tmp_path: Path) -> None:
    shape = LinearShape("odd \ud800", fakes.N, fakes.K)
    report = audit.run([fakes.by_m], [shape], sweep=[1, 2], relations=["population"], speed=False)
    assert "odd \\ud800" in report.write_html(tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_file_of_an_installed_package_shows_the_package() -> None:
    assert words.file_name("/env/site-packages/some_model/data/model.safetensors") == "some_model/model.safetensors"
    assert words.file_name("/home/model.safetensors") == "model.safetensors"


def test_summary_counts_cases_and_leads_with_the_median() -> None:
    result = audit.run([fakes.by_m], [SHAPE], sweep=[1, 2, 16], speed=False).providers["tests.audit.fakes:by_m"]
    outputs = sum(r.outputs for r in result.relations.values())
    changed = sum(result.histogram)
    assert 0 < result.changed < result.cases
    start = f"bits changed in {result.changed} of {result.cases} cases, {changed:,} of {outputs:,} outputs, "
    assert words.provider_text(result).startswith(start + "by a median of 1 ULP and at most 1 ULP")
    assert result.histogram == [
        sum(bins) for bins in zip(*(r.histogram for r in result.relations.values()), strict=True)
    ]


@pytest.mark.parametrize(
    ("counts", "label"),
    [({}, ""), ({1: 1}, "1"), ({1: 1, 4: 1}, "1"), ({1: 2, 4: 3}, "5-8"), ({0: 1, 12: 2}, "NaN")],
    ids=str,
)
def test_median_bin(counts: dict[int, int], label: str) -> None:
    assert median_ulps([counts.get(i, 0) for i in range(len(ULP_BINS))]) == label


def test_terminal_says_what_does_not_apply_and_omits_empty_tables() -> None:
    report = audit.run([fakes.honest, fakes.zeros, "isogemm"], [SHAPE], sweep=[4], speed=False)
    text = printed(report)
    assert "n/a: cases that do not apply here" in text
    assert "packing: tests.audit.fakes:honest prepares no weights" in text
    assert text.count("population") == 2  # a table for each of those that ran
    assert "tests.audit.fakes:zeros failed: fake: is not x @ w.T (relative error 1.0)" in text
    assert "M = 4." in text
    assert page(report).count("<th colspan=2>") == 2
    isogemm_alone = audit.run(["isogemm"], [LinearShape("whole", 40, 40)], sweep=[1, 2], speed=False)
    assert words.inapplicable(isogemm_alone.providers["isogemm"]) == ""


def test_where_nothing_applies_nothing_ran() -> None:
    report = audit.run(["isogemm", "numpy"], [SHAPE], sweep=[4], relations=["stream"], speed=False)
    assert (report.broken, report.missing, report.exit_status) == ([], ["isogemm", "numpy"], 3)
    text = printed(report)
    assert "Found: isogemm, numpy did not run." in text
    assert "Required: isogemm did not run" in text
    assert "is no pass: isogemm (nothing applied); numpy (nothing applied). Exit status 3" in text


def test_linears_of_which_a_sample_was_compared_are_named() -> None:
    shapes = [{"name": name, "n": n, "columns_compared": 40} for name, n in (("whole", 40), ("wide", 5000))]
    (line,) = [x for x in words.not_measured(audit.Report({}, (), {}, shapes=shapes)) if "sample" in x]
    assert line == "Compared on a sample of the output columns: wide (40 of 5,000)."


def test_unclear_timings_say_so() -> None:
    def timed(*verdicts: tuple[str, str, float]) -> dict[int, str]:
        speeds = [audit.Speed(p, "s", 1, 8, 8, ratio, ratio, ratio, ratio, verdict) for p, verdict, ratio in verdicts]
        return words.speed_by_m(audit.Report({}, (), {}, speeds=speeds), "a")

    assert timed(("a", "SLOWER", 2.0), ("b", "FASTEST", 1.0)) == {1: "2.00x"}
    assert timed(("a", "AMBIGUOUS", 2.0), ("b", "FASTEST", 1.0)) == {1: "about 2.00x (AMBIGUOUS)"}
    mixed = timed(("a", "AMBIGUOUS", 4.0), ("a", "FASTEST", 1.0), ("b", "EQUAL", 1.0))
    assert mixed == {1: "about 2.00x (AMBIGUOUS on 1 of 2 linears)"}
    assert timed(("a", "FASTEST", 1.0)) == {}  # nothing to compare with


def test_provider_colours_are_none_of_the_maps(report: audit.Report) -> None:
    from isogemm.audit import figures

    colours = set(figures.provider_colours(report).values())
    assert len(colours) == 4
    assert not colours & {figures.EQUAL_COLOUR, *figures._CHANGED_COLOURS}


def test_speed_chart_fits_the_page_with_its_whiskers_and_times(report: audit.Report) -> None:
    import vl_convert

    from isogemm.audit import figures

    sources = [SHAPE, LinearShape("b", 8, 8), LinearShape("c", 16, 8)]
    spec = figures.speed_bars(audit.run([fakes.honest, "numpy"], sources, sweep=[1], relations=["rerun"])).to_dict()
    svg = vl_convert.vegalite_to_svg(spec)
    width = re.search(r'width="([\d.]+)"', svg)
    assert width is not None
    assert float(width[1]) <= 1132  # the page's column
    assert re.search(r">[\d.]+ ms", svg)
    layers = [layer for panel in spec["concat"] for layer in panel["layer"]]
    assert len(layers) == 9
    top = layers[0]["encoding"]["y"]["scale"]["domain"][1]
    assert all(row["high"] < top for panel in spec["concat"] for row in panel["data"]["values"])
