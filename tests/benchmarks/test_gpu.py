"""The GPU benchmark's logic on the CPU: what it covers, and that a wrong bit or a missed bar cannot hide."""

from __future__ import annotations

import functools
import io
import sys
from dataclasses import replace

import pytest
from benchmarks.common import Bar, groups_text, selected, summarize
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import measure as gpu_measure
from benchmarks.gpu.bits import Sample
from benchmarks.gpu.cases import GROUPS, LLM, PEER, RANDOM, ROWS, SGLANG, SUITES, TBIK, Case, cases
from benchmarks.gpu.measure import Settings, against, calls_in_a_graph, judge, measure
from benchmarks.gpu.operands import Shelf
from benchmarks.gpu.peers import PEERS, fastest_torch, load_peers
from benchmarks.gpu.readme import OTHERS, gpu_section
from benchmarks.gpu.show import summary, tables
from rich.console import Console
from tests.benchmarks.commands import invoke
from tests.benchmarks.standin import CEILINGS, StandIn

from benchmarks import readme
from isogemm.lab import SubmitClock, Timing, read_json, write_json
from isogemm.study.bits import differing

ALL = cases(SUITES)
CHAIN = "tensor_core:sm90/chain"
TINY = {
    "linear": Case("llm", "linear", 3, 5, 16, contract=CHAIN, bars=(Bar("torch", 1e-9),), spaced=True),
    "leaf": Case("leaf", "linear", 3, 5, 16, contract="tensor_core:sm90/leaf16"),
    "trees": Case("trees", "linear", 3, 5, 128, contract="tensor_core:sm90/tree8"),
    "fp32": Case("fp32", "linear", 3, 5, 16, dtype="float32", label="ieee", error_ratio=1e9),
    "gradient": Case("leaf", "gradient", 5, 4, 32, out_dtype="float32", layout="TN", contract=CHAIN),
    "batched": Case("batched", "batched", 3, 4, 16, batch=2, contract=CHAIN),
    "host": Case("overhead", "host", 2, 3, 16, contract=CHAIN),
    "wall": Case("overhead", "wall", 2, 3, 16, contract=CHAIN),
    "replay": Case("overhead", "replay", 2, 3, 16, contract=CHAIN),
}


def timing(name, seconds):
    return Timing.of(name, [seconds] * 5, 1)


def quick():
    return Settings(rounds=5, replay_seconds=1e-4, quick=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small caches and graphs, and a choice of BLAS library that torch's CPU builds refuse to make."""
    import torch

    chosen = ["default"]

    def library(name=None):
        chosen[0] = name or chosen[0]
        return chosen[0]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    monkeypatch.setattr("benchmarks.gpu.operands.ERROR_LENGTHS", (16, 32))
    monkeypatch.setattr("benchmarks.gpu.operands.L2_BYTES", 64)
    monkeypatch.setattr(gpu_measure, "MOST_CALLS", 4)
    monkeypatch.setattr("isogemm.base.tuning._budget", 30.0)


def test_what_is_covered():
    llm = {(c.n, c.k, c.m) for c in cases(["llm"])}
    assert llm == {(n, k, m) for n, k in LLM for m in ROWS}
    assert len(llm) == 91
    assert {c.form for c in ALL} == {"linear", "gradient", "batched", "host", "wall", "replay"}
    assert {c.definition for c in cases(["fp32"])} == {"fma/chain", "tf32x3:sm90/chain"}


@pytest.mark.parametrize(
    ("suite", "only", "bars"),
    [
        ("llm", "m=1 n=2560 k=4096", ["≥ 0.95 torch"]),
        ("leaf", "TN", ["≥ 0.93 torch"]),
        ("fp32", "ieee", ["≥ 0.6 torch"]),
        ("fp32", "tf32x3:sm90/chain", ["≥ 1.7 torch"]),
        ("batched", "m=4096 QK", ["≥ 0.95 torch"]),
        ("overhead", "host m=1", ["≥ 0.4 torch"]),
    ],
)
def test_bars(suite, only, bars):
    (case,) = selected(cases([suite]), only)
    assert [str(bar) for bar in case.bars] == bars


def test_torch_means_the_fastest_of_its_own_ways():
    names = ["isogemm", "torch.mm", "torch.mm, spaced", "cublaslt", "torch.addmm"]
    assert fastest_torch(names) == ["torch.mm", "torch.addmm"]
    timings = {n: timing(n, s) for n, s in (("isogemm", 1.0), ("torch.mm", 1.5), ("torch.addmm", 1.2))}
    assert judge(Bar("torch", 1.1), timings) == "MET"
    assert judge(Bar("torch", 1.3), timings) == "NOT MET"
    assert judge(Bar(PEER, 1.3), timings) == "NOT MEASURED"
    assert judge(Bar("torch", 1.0), {"torch.mm": timing("torch.mm", 1.0)}) == "NOT MEASURED"


def _timed(seconds):
    return {name: {"median": each, "samples": [each]} for name, each in seconds.items()}


def test_a_clock_that_falls_half_way_through_is_no_difference():
    """A GPU at its power limit: of the fourth round, torch's sample came before and ours behind."""
    fast, slow = [85.0] * 3, [95.0] * 3
    ours, torch = ({"median": 95.0, "samples": [*fast, 95.0, *slow]}, {"median": 85.0, "samples": [*fast, 85.0, *slow]})
    assert against({"timings": {"isogemm": ours, "torch.mm": torch}}, "torch") == 1.0


def test_a_group_is_a_geometric_mean_of_its_own_cells():
    def row(m, ours, torch, suite="llm"):
        times = _timed({"isogemm": ours, "torch.mm": torch, PEER: 4 * ours})
        return {"suite": suite, "m": m, "timings": times}

    rows = [row(1, 1.0, 2.0), row(16, 1.0, 0.5), row(4096, 1.0, 1.0), row(1, 1.0, 99.0, "overhead")]
    everything, decode, peer_decode, peer_large, *_ = summarize(rows, GROUPS, against)
    assert everything["mean"] == pytest.approx(1.0)
    assert (everything["cells"], everything["least"], everything["result"]) == (3, 0.5, "NOT MET")
    assert (decode["mean"], decode["cells"]) == (pytest.approx(1.0), 2)
    assert (peer_decode["result"], peer_large["cells"]) == ("MET", 1)
    assert [g["result"] for g in summarize([], GROUPS, against)] == ["NOT MEASURED"] * len(GROUPS)


def test_a_graph_is_whole_passes_over_the_copies(monkeypatch):
    monkeypatch.setattr(gpu_measure, "MOST_CALLS", 400)
    tiny, large = Case("llm", "linear", 1, 64, 64), Case("llm", "linear", 4096, 28672, 4096)
    assert calls_in_a_graph(large, 2, 1.5e-3, CEILINGS) == 2
    assert calls_in_a_graph(tiny, 9, 1.5e-3, CEILINGS) == 396
    assert calls_in_a_graph(tiny, 1000, 1.5e-3, CEILINGS) == 1000


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_a_row_of_every_form(case):
    engine = StandIn()
    row = measure(case, quick(), engine, Shelf("cpu", 3), CEILINGS, dict.fromkeys(PEERS, lambda x, w: x @ w))
    assert row["error"] is None
    assert "isogemm" in row["timings"]
    assert any("mm" in name for name in row["timings"])
    assert row["correctness"]["differing"] == 0
    assert row["correctness"]["checked"] > 0
    assert row["command"].startswith("python -m benchmarks.gpu --suite ")
    assert bool(engine.captured) == (case.form not in ("host", "wall"))
    if case.suite == "llm":
        assert {"cublaslt", PEER, "isogemm, spaced", "torch.mm, spaced"} <= set(row["timings"])
        assert row["correctness"]["batch_differing"] == 0
        assert row["correctness"]["peers"]["torch.mm"]["checked"] == 15
    assert {TBIK, SGLANG}.isdisjoint(row["timings"]) == (case.suite != "trees")
    if case.suite == "fp32":
        assert set(row["correctness"]["errors"]) == set(row["timings"])
        assert row["bars"][-1] == {"bar": "error ≤ 1e+09 torch", "result": "MET"}
    if case.form == "gradient":
        assert row["absent"].keys() >= {"torch.addmm"}  # torch has no such product on a CPU
        assert row["correctness"]["errors"]["isogemm"] < 1e-5
    if "leaf" in case.contract:
        assert set(row["correctness"]["errors over k"]) == {case.contract, CHAIN}


def test_wrong_bits_of_ours_are_counted(monkeypatch):
    import isogemm

    true = isogemm.linear

    def wrong(x, w, **options):
        y = true(x, w, **options)
        if len(x) == 3:
            y[2, 4] += 1
        return y

    monkeypatch.setattr("benchmarks.gpu.operands.isogemm.linear", wrong)
    row = measure(TINY["linear"], quick(), StandIn(), Shelf("cpu", 3), CEILINGS)
    assert row["correctness"]["differing"] == 1
    assert row["correctness"]["first"]
    assert "bits: 2 of" not in summary([row]).plain  # the whole batch has the same wrong bit here
    assert "bits: 1 of" in summary([row]).plain


def test_bits_that_change_with_the_batch_are_counted(monkeypatch):
    import isogemm

    true = isogemm.linear

    def wrong(x, w, **options):
        return true(x, w, **options) if len(x) < 4096 else true(x, w, **options) * 2

    monkeypatch.setattr("benchmarks.gpu.operands.isogemm.linear", wrong)
    case = replace(TINY["linear"], m=4)
    row = measure(case, quick(), StandIn(), Shelf("cpu", 3), CEILINGS)
    assert row["correctness"]["differing"] == 0
    assert row["correctness"]["batch_differing"] == 20


def test_an_error_of_ours_is_a_row_and_peers_that_cannot_are_named(monkeypatch):
    def fail(*_, **__):
        raise NotImplementedError("no kernel")

    row = measure(TINY["linear"], quick(), StandIn(), Shelf("cpu", 3), CEILINGS, {PEER: fail})
    assert row["absent"] == {PEER: "NotImplementedError: no kernel"}
    monkeypatch.setattr("benchmarks.gpu.operands.isogemm.linear", fail)
    row = measure(TINY["linear"], quick(), StandIn(), Shelf("cpu", 3), CEILINGS)
    assert row["error"] == "NotImplementedError: no kernel"
    assert row["timings"] == {}
    assert "failed: llm" in summary([row]).plain


def test_the_sample_sees_one_bit_and_tails():
    import torch

    import isogemm

    a, b = torch.randn(9, 33), torch.randn(33, 70)
    got = isogemm.matmul(a, b)
    sample = Sample.of(a, b, "fma/chain", [0, 4, 8, 99])
    assert sample.check(got)["differing"] == 0
    assert sample.check(got[:5])["checked"] == 2 * 48
    other = got.clone()
    other.view(torch.int32)[8, 69] ^= 1
    assert sample.check(other)["differing"] == 1
    assert differing(got, other) == 1


def test_settings_of_a_peer_are_put_back():
    import torch
    from benchmarks.gpu.peers import without_split_k

    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    matmul = torch.backends.cuda.matmul

    def now():
        settings = [getattr(matmul, n + s) for n in names for s in ("", "_split_k")]
        return [*settings, torch.backends.cuda.preferred_blas_library()]

    before = now()

    def failing():
        with without_split_k():
            assert now() == [False] * 4 + ["cublaslt"]
            raise RuntimeError("out")

    with pytest.raises(RuntimeError, match="out"):
        failing()
    assert now() == before


def test_an_absent_peer_is_said(tmp_path):
    called, words = load_peers(None)
    assert (called, words.count("absent (no --peers)")) == ({}, 3)
    assert load_peers(tmp_path)[1].count("holds no") == 3
    package = tmp_path / PEER
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / f"{PEER}.py").write_text("def matmul_persistent(a, b):\n    return a @ b\n")
    called, words = load_peers(tmp_path)
    assert list(called) == [PEER]
    assert (words.count("sha256"), words.count(": absent (")) == (1, 2)
    assert str(tmp_path) not in sys.path


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(gpu, "SUITES", {"llm": None})
    monkeypatch.setattr(gpu, "cases", lambda suites, **_: [TINY["linear"]])
    monkeypatch.setattr(gpu, "open_engine", StandIn)
    return functools.partial(invoke, gpu.main, "--quick")


def test_a_run_prints_tables_and_writes_rows(command, tmp_path):
    result = command("--out", str(tmp_path / "r.json"), "--seed", "5")
    assert result.exit_code == 0, result.output
    assert f"{PEER}: absent" in result.output
    assert "(5, 16)" in result.output
    content = read_json(tmp_path / "r.json")
    assert content["device"]["after"] == {"name": "Stand-in 9000"}
    assert content["ceilings"] == CEILINGS
    assert len(content["groups"]) == len(GROUPS)
    (row,) = content["rows"]
    assert row["command"].endswith("--seed 5 --quick")


@pytest.mark.parametrize(
    ("suite", "words", "steps"),
    [
        (RANDOM, (), ["prepare"]),
        (RANDOM, ("--tuned",), ["prepare", "tune"]),
        ("llm", (), []),
        ("llm", ("--bare", "--tuned"), ["forget_tables", "prepare", "tune"]),
    ],
)
def test_products_are_timed_ahead_if_asked_for_and_never_meanwhile(suite, words, steps, command, tmp_path, monkeypatch):
    import isogemm

    done = []
    drawn = replace(TINY["linear"], suite=suite)
    monkeypatch.setattr(gpu, "cases", lambda suites, **_: [drawn])
    for step in ("forget_tables", "prepare", "tune"):
        monkeypatch.setattr(StandIn, step, lambda self, *of, step=step: done.append((step, *of)), raising=False)
    result = command("--suite", suite, "--out", str(tmp_path / "r.json"), *words)
    assert result.exit_code == 0, result.output
    assert done == [(step, *[[drawn]] * (step != "forget_tables")) for step in steps]
    assert isogemm.get_tuning() == 0
    kept = read_json(tmp_path / "r.json")
    assert [kept["tuned"], kept["bare"]] == ["--tuned" in words, "--bare" in words]
    assert set(words) == {"--tuned", "--bare"} & set(kept["rows"][0]["command"].split())
    aligned = next(group for group in kept["groups"] if group["group"].startswith("drawn, 16 bits, N and K"))
    assert aligned["bars"] == ([1.05, 0.95, 0.85] if "--tuned" in words else [1.0, 0.9, 0.0])


def test_wrong_bits_fail_the_run(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Sample, "check", lambda *_: {"contract": CHAIN, "checked": 9, "differing": 2, "first": "x"})
    assert command("--out", str(tmp_path / "r.json")).exit_code == 1


@pytest.mark.parametrize("words", [("--suite", "none"), ("--only", "m=9999")])
def test_bad_usage_exits_with_2(command, words, tmp_path):
    assert command("--out", str(tmp_path / "r.json"), *words).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_rows_of_every_kind_can_be_shown():
    rows = [measure(case, quick(), StandIn(), Shelf("cpu", 3), CEILINGS) for case in TINY.values()]
    failed = gpu_measure._row(TINY["linear"], quick(), {}, None, CEILINGS, None, {"p": "no"}, "ValueError: no")
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables([*rows, failed]):
        console.print(table)
    console.print(groups_text(summarize(rows, GROUPS, against)))
    text = console.export_text()
    assert "ValueError: no" in text
    assert "time of torch.mm / time of isogemm" in " ".join(text.split())
    assert "absent: p: no" in summary([failed]).plain
    assert against(failed, "torch") is None


def test_the_kernel_of_a_row_is_the_one_that_the_call_ran(monkeypatch):
    from types import SimpleNamespace

    from isogemm.backends.cuda.gemm import choose, execute

    chosen = SimpleNamespace(choose=lambda product: SimpleNamespace(family="f", config=product, reason="why"))
    monkeypatch.setattr(choose, "chooser", lambda device: chosen)
    monkeypatch.setattr(execute, "choose", true := lambda product, device: None)
    assert gpu_measure.kernel_of(lambda i: [execute.choose(c, 0) for c in "aab"]) == "f [a], why; f [b], why"
    assert gpu_measure.kernel_of(lambda i: None) is None
    assert execute.choose is true


def gpu_run(*rows):
    return {"benchmark": "gpu", "rows": list(rows), "device": {"before": {"name": "Stand-in", "packages": {}}}}


def test_the_readme_gets_ratios_bits_and_sources():
    def row(name, suite, m, ours, torch, differing=0):
        timings = _timed({"isogemm": ours, "torch.mm": torch, "torch.addmm": 9.0})
        bits = {"checked": 500, "differing": differing, "batch_checked": 1000, "batch_differing": 0}
        facts = {"n": 5, "k": 6, "m": m, "suite": suite, "error": None}
        return {"name": name, "timings": timings, "correctness": bits, **facts}

    first = gpu_run(row("llm m=1", "llm", 1, 1.0, 5.0), row("leaf x TN", "leaf", 4096, 1.0, 0.9))
    again = gpu_run(row("llm m=1", "llm", 1, 1.0, 2.0), row("llm m=16", "llm", 16, 1.0, 0.5, differing=3))
    text = gpu_section([first, again], ["a.json", "b.json"])
    assert "| M = 1 to 16 | 1.00 (0.50 to 2.00) | not measured | not measured |" in text
    assert "| order `leaf4096`, weight gradient 14336 x 4096 over 8192 tokens | 0.90 |" in text
    assert "Of 1,500 sampled elements 3 differ from the definition; of 3,000, 0 differ" in text
    assert text.endswith("`a.json`,\n`b.json`.\n")


def test_the_page_has_drawn_products_by_kind():
    def row(n, dtype, ours, torch):
        timings = _timed({"isogemm": ours, "torch.mm": torch})
        facts = {"suite": "random", "m": 3, "n": n, "k": 64, "dtype": dtype, "error": None}
        return {"name": f"random {n} {dtype} {torch}", "timings": timings, "correctness": None, **facts}

    drawn = [row(64, "bfloat16", 1.0, 2.0), row(64, "float16", 1.0, 0.5), row(65, "bfloat16", 2.0, 3.0)]
    tuned = {**gpu_run(row(64, "bfloat16", 1.0, 2.0)), "tuned": True}
    text = gpu_section([gpu_run(*drawn), tuned], ["a.json", "b.json"])
    assert "| 16 bits, N and K multiples of 8, chosen by the models | 2 | 1.00 | 0.50 | 0.50 |" in text
    assert "| 16 bits, an odd N or K, chosen by the models | 1 | 1.50 | 1.50 | 1.50 |" in text
    assert "| 16 bits, N and K multiples of 8, after live tuning | 1 | 2.00 | 2.00 | 2.00 |" in text
    assert "float32 |" not in text


def test_each_section_of_the_page_is_written_from_its_own_files(tmp_path, monkeypatch):
    page = tmp_path / "performance.md"
    (begin, end), (gpu_begin, gpu_end) = readme.marks(""), readme.marks("gpu ")
    marks = (begin, "old\n", end, "\nbetween\n", gpu_begin, "old\n", gpu_end, "\nafter\n")
    page.write_text("".join(marks))
    monkeypatch.setattr(readme, "PAGE", page)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "SECTIONS", (("gpu", "gpu ", lambda runs, names: f"{len(runs)} of {names}\n"),))
    write_json(tmp_path / "g.json", [], environment={}, benchmark="gpu")
    front = tmp_path / "README.md"
    front.write_text("before\n" + "old\n".join(readme.HEADLINES) + "\nafter\n")
    monkeypatch.setattr(readme, "README", front)
    monkeypatch.setattr(readme, "headlines", lambda: "new\n")
    readme.main([tmp_path / "g.json"])
    assert front.read_text() == "before\n" + "new\n".join(readme.HEADLINES) + "\nafter\n"
    kept = "".join(marks[:5])
    assert page.read_text() == f"{kept}1 of ['g.json']\n{gpu_end}\nafter\n"


def test_every_other_line_of_the_page_names_cases():
    for _, key in OTHERS:
        assert any(set(key.split()) <= set(case.words) for case in ALL), key


def test_submissions_are_timed_in_pieces_that_fit_the_queue():
    waits, calls = [], []
    clock = SubmitClock(lambda: waits.append(len(calls)))
    assert clock.elapsed(calls.append, 10, 600) > 0
    assert calls == list(range(10, 610))
    assert waits == [0, 256, 512, 600]
