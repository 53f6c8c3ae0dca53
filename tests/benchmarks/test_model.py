"""The benchmark of whole models at sizes that a CPU takes milliseconds for: what it covers, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.common import selected
from benchmarks.gpu.engine import HostEngine
from benchmarks.model import __main__ as model
from benchmarks.model import measure as model_measure
from benchmarks.model.build import Shelf, Step
from benchmarks.model.cases import GRAD, LINEARS, MAIN_GRAD, ROUTED, SUITES, TORCH, TREE, WHOLE, Sizes, cases, tiny
from benchmarks.model.measure import Made, Settings, measure, wrong
from benchmarks.model.readme import model_section
from benchmarks.model.show import line, summary, table
from rich.console import Console
from tests.benchmarks.commands import invoke

from isogemm.lab import read_json

pytest.importorskip("torch")
pytest.importorskip("transformers")

ALL = cases(list(SUITES))
VARIANTS = {TORCH, LINEARS, ROUTED, WHOLE, TREE}


@pytest.fixture(scope="module")
def shelf():
    return Shelf(Sizes.of_tests(), "cpu", 3)


def quick():
    return Settings(rounds=5, block_seconds=1e-3, quick=True)


def one(suite, only):
    (case,) = selected(cases([suite]), only)
    return tiny(case)


def run(*words):
    return invoke(model.main, "--device", "cpu", "--tiny", "--quick", *words)


def test_what_is_covered():
    model_cases = cases(["model"])
    assert {(c.phase, c.batch, c.tokens) for c in model_cases} == {
        *(("decode", batch, 1) for batch in (1, 8, 64)),
        ("prefill", 1, 4096),
    }
    assert {c.mode for c in ALL} == {"eager", "graph", "compile", "compile-graph"}
    assert {(c.phase, c.tokens) for c in cases(["train"])} == {("mlp", 8192), ("attention", 8192)}


@pytest.mark.parametrize(
    ("suite", "only", "bars"),
    [
        ("model", "decode graph batch=8", {LINEARS: 0.95, ROUTED: 0.95, WHOLE: 0.8, TREE: 0.95}),
        ("model", "prefill eager", {LINEARS: 0.7, ROUTED: 0.7}),
        ("train", "mlp graph", {GRAD: 0.97, MAIN_GRAD: 0.97}),
    ],
)
def test_bars(suite, only, bars):
    (case,) = selected(cases([suite]), only)
    assert {bar.variant: bar.value for bar in case.bars} == bars


def test_all_variants_of_a_step_share_their_weights_and_one_cache(shelf):
    models = shelf.models(0)
    assert set(models) == VARIANTS - set(shelf.absent)
    plain = dict(models[TORCH].named_parameters())
    for other in models.values():
        assert all(p is plain[name] for name, p in other.named_parameters())
    case = one("model", "decode graph batch=64")
    alone, together = shelf.inputs(case, 1), shelf.inputs(case, 3)
    assert (alone["input_ids"] == together["input_ids"][:1]).all()
    first = alone["past_key_values"].layers[0].keys
    assert first.data_ptr() == together["past_key_values"].layers[0].keys.data_ptr()
    assert first.shape[2] == case.context


@pytest.mark.parametrize("only", ["decode eager batch=8", "decode graph batch=1", "prefill eager"])
def test_a_row_of_the_model(shelf, only):
    case = one("model", only)
    row, runs = measure(case, quick(), HostEngine(), shelf)
    assert row["error"] is None
    assert set(row["timings"]) == set(runs) == VARIANTS - set(shelf.absent)
    assert row["tokens_per_second"][TORCH] == pytest.approx(case.count / row["timings"][TORCH]["median"])
    assert all((bar["result"] == "NOT MEASURED") == (bar["bar"].split(" ≥")[0] in shelf.absent) for bar in row["bars"])
    assert bool(row["correctness"]) == (case.mode == "eager")
    assert wrong(row) == 0
    assert f"{case.name}: torch " in line(row)


def test_a_step_s_logits_are_those_of_the_whole_prompt(shelf):
    import torch

    case = one("model", "prefill eager")
    whole = shelf.steps(case)[TORCH](0)
    ids = shelf.inputs(case, 1)["input_ids"]
    with torch.no_grad():
        expected = shelf.models(0)[TORCH](input_ids=ids).logits[:, -1:]
    torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("phase", ["mlp", "attention"])
def test_a_row_of_training(shelf, phase):
    row, _ = measure(one("train", f"{phase} eager"), quick(), HostEngine(), shelf)
    assert row["error"] is None
    assert set(row["timings"]) == {TORCH, GRAD, MAIN_GRAD, "torch, float32 sums"}
    assert row["correctness"][MAIN_GRAD]["differing"] == 0
    assert row["correctness"][TORCH]["differing"] > 0  # rounded between micro-batches: the count can be seen to count


def test_training_candidates_compute_the_same_gradients():
    import torch
    from benchmarks.model import train as model_train

    layers, absent = model_train.build(one("train", "mlp eager"), Sizes.of_tests(), "cpu", 3)
    assert not absent
    expected = None
    for candidate in layers.values():
        candidate.step()(0)
        found = [x.float() for x in (*candidate.totals(), candidate.inputs[0].grad)]
        expected = expected or found
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)


def test_bits_that_change_are_counted_and_fail_the_run(shelf, monkeypatch, tmp_path):
    case = one("model", "decode eager batch=8")
    calls = []

    def changing(i):
        import torch

        calls.append(i)
        return torch.full((1, 4), float(len(calls)))

    monkeypatch.setattr(Shelf, "steps", lambda self, case, batch=0: {TORCH: Step(changing), WHOLE: Step(changing)})
    row, _ = measure(case, quick(), HostEngine(), shelf)
    assert row["correctness"][WHOLE] == {"differing": 4, "checked": 4}
    assert wrong(row) == 4
    result = run("--suite", "model", "--only", "decode eager batch=8", "--out", str(tmp_path / "r.json"))
    assert result.exit_code == 1, result.output


def test_what_fails_is_named_and_the_rest_is_measured(shelf, monkeypatch):
    def fail(i):
        raise NotImplementedError("no kernel")

    good = Step(lambda i: sum(range(1000)))
    monkeypatch.setattr(Shelf, "steps", lambda self, case, batch=0: {TORCH: good, WHOLE: Step(fail), LINEARS: good})
    row, _ = measure(one("model", "decode graph batch=8"), quick(), HostEngine(), shelf)
    assert row["absent"] == dict(shelf.absent) | {WHOLE: "NotImplementedError: no kernel"}
    assert set(row["timings"]) == {TORCH, LINEARS}
    assert {bar["bar"]: bar["result"] for bar in row["bars"]}[f"{WHOLE} ≥ 0.8 torch"] == "NOT MEASURED"
    assert "absent from 1 cases" in summary([row]).plain
    broken = model_measure._row(one("train", "mlp graph"), quick(), {}, Made({}, {}), "ValueError: no")
    assert line(broken).endswith("ValueError: no")
    console = Console(width=200, record=True)
    console.print(table([row, broken]))
    assert "ValueError: no" in console.export_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, when it is loaded
def test_nothing_is_compiled_after_the_given_time(shelf):
    case = one("compiled", "compile")
    row, _ = measure(case, replace(quick(), compile_until=0.0), HostEngine(), shelf)
    assert row["timings"] == {}
    assert row["absent"][TORCH].startswith("not compiled: ")
    assert row["error"] is None
    assert "not compiled: " in line(row)


def test_a_run_writes_rows_that_can_be_read(tmp_path):
    path = tmp_path / "r.json"
    words = ("--suite", "train", "--only", "mlp graph", "--seed", "5", "--out", str(path), "--profile", "mlp")
    result = run(*words)
    assert result.exit_code == 0, result.output
    content = read_json(path)
    assert content["benchmark"] == "model"
    (row,) = content["rows"]
    assert (
        row["command"]
        == "python -m benchmarks.model --suite train --only 'mlp graph batch=1 tokens=64' --seed 5 --quick"
    )
    assert "sum" in result.output


def test_the_readme_gets_rates_ratios_and_bits(shelf):
    rows = []
    for suite, only in (("model", "decode eager batch=8"), ("model", "prefill graph"), ("train", "mlp eager")):
        rows.append(measure(one(suite, only), quick(), HostEngine(), shelf)[0])
    content = {"rows": rows, "device": {"before": {"name": "Stand-in", "packages": {"torch": "9.9"}}}}
    text = model_section([content], ["a.json"])
    plain = rows[0]["tokens_per_second"][TORCH]
    assert f"| decode, batch 2 | eager | {plain:,.0f}/s | " in text
    assert "| prefill of 24 | CUDA graph | " in text
    assert "| MLP 2560, 9728 | eager | " in text
    assert "0 of 256 with isogemm's linears, 0 of 256 with everything." in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
    (whole,) = (v["ratio"] for v in rows[0]["verdicts"] if v["ours"] == WHOLE)
    assert f"| {whole:.2f} |" in text
    assert text.endswith("`a.json`.\n")


@pytest.mark.parametrize("words", [("--suite", "none"), ("--only", "batch=9")])
def test_bad_usage_exits_with_2(words, tmp_path):
    assert run("--out", str(tmp_path / "r.json"), *words).exit_code == 2
