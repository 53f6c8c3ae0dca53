"""The benchmark scripts: what they promise to cover, and that a wrong bit or a missed bar cannot hide."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from benchmarks.common import Bar, selected
from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import measure
from benchmarks.cpu.cases import RANDOM, SUITES, Case, cases
from benchmarks.cpu.measure import Machine, Settings, judge, of_threads
from benchmarks.cpu.operands import build, compare
from benchmarks.cpu.processes import ReportedClock
from benchmarks.cpu.show import summary, table
from tests.benchmarks.commands import invoke
from typer import BadParameter

from isogemm.contract import reference
from isogemm.lab import Ceilings, Timing, read_json

ALL = cases([*SUITES, RANDOM])


def timing(name: str, seconds: float) -> Timing:
    return Timing.of(name, [seconds] * 5, 1)


def test_a_word_is_matched_whole():
    assert {case.m for case in selected(cases(["llm"]), "m=1")} == {1}
    assert len(selected(ALL, "")) == len(ALL)
    with pytest.raises(BadParameter, match="no case has all the words 'm=1 m=2'"):
        selected(ALL, "m=1 m=2")


@pytest.mark.parametrize(
    ("suite", "only", "bars"),
    [
        ("square", "m=4096 TT", ["≥ 1 numpy", "≥ 1 torch"]),
        ("llm", "m=1 n=9728", ["≥ 1 fastest"]),
        ("llm", "m=16 n=2560 k=9728", ["≥ 1.5 fastest"]),
        ("llm", "m=64 n=4096", ["≥ 1 fastest"]),
        ("packed", "m=1 n=4096", ["≥ 1.1 fastest", "≥ 0.9 read"]),
        ("packed", "m=64 n=4096", ["≥ 1.3 fastest"]),
        ("packed", "m=256 n=4096", []),
        ("bf16", "m=1 n=4096", ["≥ 1.7 torch"]),
        ("bf16", "m=4 n=4096", ["≥ 1.1 torch"]),
        ("bf16", "m=16 n=4096", []),
        ("small", "call", ["≥ 0.667 numpy"]),
        ("reference", "m=64", ["≤ 1 s"]),
        ("import", "isogemm", ["≤ 0.5 s"]),
    ],
)
def test_bars(suite, only, bars):
    (case,) = selected(cases([suite]), only)
    assert [str(bar) for bar in case.bars] == bars


def test_bars_are_judged_by_whole_intervals_against_the_right_peer():
    timings = {"isogemm": timing("isogemm", 1.0), "numpy": timing("numpy", 1.2), "torch": timing("torch", 1.6)}
    assert judge(Bar("numpy", 1.2), timings) == "MET"
    assert judge(Bar("numpy", 1.3), timings) == "NOT MET"
    assert judge(Bar("torch", 1.3), timings) == "MET"
    assert judge(Bar("fastest", 1.3), timings) == "NOT MET"
    assert judge(Bar("seconds", 0.9), timings) == "NOT MET"
    assert judge(Bar("seconds", 1.0), timings) == "MET"
    del timings["torch"]
    assert judge(Bar("fastest", 1.1), timings) == "NOT MEASURED"
    assert judge(Bar("numpy", 1.1), {}) == "NOT MEASURED"
    assert judge(Bar("seconds", 1.0), {"isogemm": Timing.of("isogemm", [0.5, 1.5, 0.5, 1.5, 1.0], 1)}) == "AMBIGUOUS"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_wrong_bit_in_a_sampled_element_is_seen(dtype):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 1, 9)).astype(dtype), rng.standard_normal((2, 9, 70)).astype(dtype)
    got = np.stack(
        [reference.epilogue(reference.evaluate(x, y, "fma/chain"), out_dtype=dtype) for x, y in zip(a, b, strict=True)]
    )
    assert compare(a, b, got, rng) == {"contract": "fma/chain", "checked": 128, "differing": 0, "first": None}
    got.view(f"u{got.itemsize}")[1, 0, -1] ^= 1  # the last column is always in the sample
    result = compare(a, b, got, rng)
    assert result["differing"] == 1
    assert result["first"]


@pytest.mark.parametrize("peers", [("numpy",), ()])
@pytest.mark.parametrize(
    "case",
    [
        Case("t", "matmul", 5, 6, 7, layout="TN"),
        Case("t", "matmul", 5, 6, 7, batch=3, layout="NT"),
        Case("t", "call", 5, 6, 7),
    ],
    ids=lambda case: case.name,
)
def test_every_candidate_computes_the_product(case, peers):
    setup = build(case, peers, seed=1)
    a, b, got = setup.result()
    assert a.shape == (case.batch, 5, 7)
    for candidate in (setup.ours, *setup.peers):
        np.testing.assert_allclose(np.reshape(candidate.run(0), got.shape), a @ b, rtol=1e-5, atol=1e-5)
    assert {c.name for c in setup.peers} == set(peers)


@pytest.fixture
def quick(monkeypatch):
    """One tiny case in place of the suites, and ceilings that are not measured."""
    tiny = Case("tiny", "matmul", 4, 5, 6, bars=(Bar("numpy", 1e-6), Bar("torch", 1e-6)))
    monkeypatch.setattr(cpu, "SUITES", {"tiny": lambda: [tiny]})
    monkeypatch.setattr(cpu, "cases", lambda suites, **_: [tiny])
    monkeypatch.setattr(Machine, "ceilings", lambda self, threads: Ceilings(threads, 1e9, 1e9))
    return functools.partial(invoke, cpu.main, "--quick", "--threads", "1", "--peers", "numpy")


def test_a_run_prints_bars_and_writes_rows_that_can_be_repeated(quick, tmp_path):
    result = quick("--json", str(tmp_path / "r.json"), "--seed", "5")
    assert result.exit_code == 0, result.output
    assert "bars: 1 met, 1 not measured; bits: 0 of 20 sampled elements differ" in result.output
    content = read_json(tmp_path / "r.json")
    (row,) = content["rows"]
    words = "--suite tiny --only 'm=4 n=5 k=6 NN float32' --threads 1 --peers numpy --seed 5 --quick"
    assert row["command"] == f"python -m benchmarks.cpu {words}"
    assert set(row["timings"]) == {"isogemm", "numpy"}
    assert [v["peer"] for v in row["verdicts"]] == ["numpy"]
    assert row["correctness"]["differing"] == 0
    assert row["bars"][1] == {"bar": "≥ 1e-06 torch", "result": "NOT MEASURED"}
    assert row["kernel"] == row["plan"]["strategy"]
    assert content["environment"]["cpu"]["model"]


def test_a_peer_that_the_environment_holds_back_is_not_timed(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    result = quick("--json", str(tmp_path / "r.json"))
    assert result.exit_code == 2
    assert "env -u OPENBLAS_CORETYPE python" in " ".join(result.output.split())
    assert not (tmp_path / "r.json").exists()
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    assert quick("--json", str(tmp_path / "r.json")).exit_code == 0


def test_wrong_bits_fail_the_run(quick, tmp_path, monkeypatch):
    wrong = {"contract": "fma/chain", "checked": 20, "differing": 3, "first": "here"}
    monkeypatch.setattr(measure, "compare", lambda *_: wrong)
    result = quick("--json", str(tmp_path / "r.json"))
    assert result.exit_code == 1
    assert "3 of 20 sampled elements differ" in result.output


def test_an_error_of_ours_is_a_row_and_fails_the_run(quick, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr("benchmarks.cpu.operands.isogemm.matmul", fail, raising=False)
    result = quick("--json", str(tmp_path / "r.json"))
    assert result.exit_code == 1
    assert "NotImplementedError: no kernel" in result.output
    (row,) = read_json(tmp_path / "r.json")["rows"]
    assert set(row["timings"]) == {"numpy"}  # the peers are still timed


def test_a_busy_machine_has_a_clock_of_its_own(quick, tmp_path, monkeypatch):
    asked = []
    elapsed = measure.CpuClock.elapsed
    monkeypatch.setattr(measure.CpuClock, "elapsed", lambda *args: asked.append(args) or elapsed(*args))
    assert quick("--json", str(tmp_path / "r.json"), "--clock", "cpu").exit_code == 0
    content = read_json(tmp_path / "r.json")
    assert asked
    assert content["clock"] == "cpu"
    assert content["rows"][0]["command"].endswith("--quick")
    assert "--clock cpu" in content["rows"][0]["command"]


def test_a_quiet_clock_says_how_much_was_held_up(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.QuietClock, "SHARE", -1.0)  # nothing is so quiet
    monkeypatch.setattr(measure.QuietClock, "MOST", 2)
    monkeypatch.setattr("isogemm.lab.clock._waited", lambda: 0.0)
    assert quick("--json", str(tmp_path / "r.json"), "--clock", "quiet", "--threads", "1,2").exit_code == 0
    assert [row["held_up"] for row in read_json(tmp_path / "r.json")["rows"]] == [1.0, 1.0]


BAD = ["--suite none", "--only m=3", "--threads 0", "--threads 1;2", "--peers mkl", "--clock sun"]


@pytest.mark.parametrize("words", [*map(str.split, BAD), ["--clock", "cpu", "--threads", "1,2"]], ids=" ".join)
def test_bad_usage_exits_with_2(quick, words, tmp_path):
    assert quick("--json", str(tmp_path / "r.json"), *words).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_child_process_reports_its_own_time():
    assert ReportedClock().elapsed(lambda i: f"{i}.5", 1, 3) == 7.5


def test_rows_of_every_kind_can_be_shown():
    settings = Settings((), (1,))
    done = {"isogemm": timing("isogemm", 2e-6), "numpy": timing("numpy", 3e-6), "read": timing("read", 1e-6)}
    failed = measure._row(ALL[0], 1, settings, {}, None, None, "", "ValueError: no")
    rows = [
        measure._row(case, 1, settings, done, None, Ceilings(1, 1e10, 1e11), "in cache", None)
        for case in (selected(ALL, "llm m=1 n=9728")[0], selected(ALL, "import isogemm")[0])
    ]
    assert table([*rows, failed]).row_count == 3
    assert "1 cases failed" in summary([*rows, failed]).plain


def test_layers_are_judged_at_each_thread_count_alone():
    def layer(threads, seconds):
        timings = {"isogemm": {"samples": [1.0] * 5}, "numpy": {"samples": [seconds] * 5}}
        return {"suite": RANDOM, "form": "linear", "m": 2, "rotated": True, "threads": threads, "timings": timings}

    rows = [layer(1, 2.0), layer(2, 8.0)]
    assert [of_threads(rows, threads)[0]["least"] for threads in (1, 2)] == [2.0, 8.0]
    assert [of_threads(rows, threads)[0]["cells"] for threads in (1, 2)] == [1, 1]
