"""The benchmark of quantized weights on a GPU, its logic on the CPU: a wrong bit or a missed bar cannot hide."""

from __future__ import annotations

import functools
import shlex
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from benchmarks.common import selected
from benchmarks.llama.build import stubs, undefined
from benchmarks.llama.cuda import LlamaCuda
from benchmarks.quant_gpu import __main__ as quant_gpu
from benchmarks.quant_gpu import measure as quant_gpu_measure
from benchmarks.quant_gpu import operands as quant_gpu_operands
from benchmarks.quant_gpu.cases import (
    BARRED,
    DRAWN,
    FORMATS,
    FP32,
    OURS,
    PLAIN,
    PLAIN_FP32,
    Q8,
    RANDOM,
    ROWS,
    SHAPES,
    Case,
    cases,
    drawn,
)  # fmt: skip
from benchmarks.quant_gpu.kernels import kernel_of
from benchmarks.quant_gpu.measure import Settings, groups, measure, wrong
from benchmarks.quant_gpu.operands import LLAMA, TORCH, Peers, Shelf, blocks
from benchmarks.quant_gpu.peers import GEMLITE, GemLite, _compile_all, grouped, load_gemlite, q4_0_codes
from benchmarks.quant_gpu.readme import quant_gpu_section
from benchmarks.quant_gpu.show import line, summary, table
from rich.console import Console
from tests.benchmarks.commands import invoke
from tests.benchmarks.standin import CEILINGS, StandIn

import isogemm
from isogemm.formats.reference import decode
from isogemm.lab import Timing, read_json
from isogemm.quant import QuantizedMatrix

FLOATS = {FP32, PLAIN_FP32}
TINY = Case("Q4_K", 3, 16, 256)


class Multiplier:
    """A GemLite that multiplies plain weights."""

    version = "0"
    prepared = 0

    def layers(self, format, rows, weight, copies):
        return [lambda x: x @ weight.T] * copies

    def prepare(self, layer, inputs):
        self.prepared += 1


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in ("gpu", "quant_gpu"):
        monkeypatch.setattr(f"benchmarks.{module}.operands.L2_BYTES", 64)
    monkeypatch.setattr(quant_gpu_measure, "MOST_CALLS", 4)
    monkeypatch.setattr(quant_gpu_operands, "LEAST", 20)


def quick():
    return Settings(rounds=5, replay_seconds=1e-5)


def measured(case=TINY, peers=None):
    return measure(case, quick(), StandIn(), Shelf("cpu", 3, peers or Peers(), (case.m,)), CEILINGS)


def test_names_are_unique_and_everything_asked_for_is_covered():
    found = cases()
    assert len({case.name for case in found}) == len(found) == len(FORMATS) * len(ROWS) * len(SHAPES)
    assert {(c.n, c.k) for c in found[: len(found) // 2]} == set(BARRED)


@pytest.mark.parametrize(
    ("format", "m", "bars"),
    [
        ("Q4_0", 1, (2.8, 2.2)),
        ("Q4_K", 1, (2.8, 2.2)),
        ("Q4_0", 16, (2.2, 1.8)),
        ("Q4_K", 16, (2.2, 1.8)),
        ("Q8_0", 1, (1.6, 1.4)),
        ("Q8_0", 16, (1.6, 1.4)),
        ("Q6_K", 512, (0.8, 0.8)),
    ],
)
def test_bars_are_against_our_own_product_with_bfloat16_weights(format, m, bars):
    for (n, k), value in zip(BARRED, bars, strict=True):
        (bar,) = Case(format, m, n, k).bars
        assert (bar.against, bar.value) == (PLAIN, value)
    assert not Case(format, m, 4096, 4096).bars
    assert not Case("Q6_K", 1, *BARRED[0]).bars


def test_work_counts_the_blocks_and_not_more():
    case = Case("Q4_0", 1, 64, 128)
    assert case.weight_bytes == 64 * 128 // 32 * 18
    assert case.work.nbytes == case.weight_bytes + 2 * (64 + 128)
    assert case.plain_work.nbytes == 2 * (64 * 128 + 64 + 128)
    assert case.plain_fp32_work.nbytes == 2 * case.plain_work.nbytes


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_legal_about_1_and_the_same_for_the_same_seed(format):
    rows = blocks(format, 8, 512, "cpu", 1)
    values = QuantizedMatrix.from_bytes(rows.numpy(), shape=(8, 512), format=format).dequantize()
    assert 0.2 < values.std() < 3
    assert rows.equal(blocks(format, 8, 512, "cpu", 1))
    assert not rows.equal(blocks(format, 8, 512, "cpu", 2))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_every_format(format):
    row = measured(Case(format, 3, 16, 256))
    assert row["error"] is None
    assert set(row["timings"]) == {OURS, Q8, PLAIN, TORCH} | FLOATS
    found = row["correctness"]
    for part in (found, found["q8"], found["fp32"]):
        assert part["checked"] == 2 * 16  # both ends of the rows
        assert part["batch_checked"] == 3 * 16
    assert found["plain_checked"] == found["fp32"]["plain_checked"] == 3 * 16
    assert found["fp32"]["contract"] == "fma/chain"
    assert wrong(row) == 0
    assert found["apart"][PLAIN] == 0.0
    assert 0 < found["apart"][Q8] < 0.05
    assert 0 < found["apart"][FP32] < 0.01
    assert row["command"] == f"python -m benchmarks.quant_gpu --formats {format} --m 3 --shapes 16x256"
    pairs = {(OURS, PLAIN), (OURS, TORCH), (Q8, PLAIN), (FP32, PLAIN), (FP32, PLAIN_FP32)}
    assert {(v["ours"], v["peer"]) for v in row["verdicts"]} == pairs


def test_float32_activations_are_for_few_rows_and_have_no_bar():
    row = measured(Case("Q8_0", 17, 16, 64))
    assert not FLOATS & set(row["timings"])
    assert "fp32" not in row["correctness"]
    assert FP32 not in summary([row]).plain
    few = Case("Q8_0", 16, *BARRED[0])
    timings = {name: Timing.of(name, [1.0] * 5, 1) for name in (OURS, PLAIN, FP32, PLAIN_FP32)}
    row = quant_gpu_measure._row(few, quick(), timings, None, CEILINGS, None, None, {})
    assert [bar["bar"].split()[0] for bar in row["bars"]] == ["same"]
    assert f"{FP32} has none" in summary([row]).plain
    assert f"{FP32} / {PLAIN_FP32} 1.00" in line(row)
    console = Console(width=quant_gpu.WIDTH, record=True)
    console.print(table([row]))
    assert f"fp32 / {PLAIN_FP32}" in console.export_text()


def test_drawn_products_are_of_every_format_and_more_begin_with_the_same_ones():
    few, more = drawn(3, 20), drawn(3, 200)
    assert more[: len(few)] == few
    assert set(few) != set(drawn(4, 20))
    assert {case.format for case in more} == set(DRAWN)
    assert len(DRAWN) == 10
    assert all(512 <= size <= 16384 and size % 256 == 0 for case in more for size in (case.n, case.k))
    assert all(1 <= case.m <= 512 for case in more)
    assert not any(case.fp32 or case.bars for case in more)


def test_the_line_of_a_drawn_row_draws_it_again():
    cases = drawn(3, 60)
    for case in cases:
        words = shlex.split(Settings(seed=3).command(case))
        assert words[3:5] + words[7:] == ["--suite", RANDOM, "--seed", "3"]
        assert selected(cases, words[6]) == [case]


def test_drawn_products_are_grouped_by_bits_and_rows():
    row = measured(Case("Q4_1", 3, 16, 64, RANDOM))
    assert set(row["timings"]) == {OURS, Q8, PLAIN}
    assert row["error"] is None
    times = {OURS: 2.0, Q8: 1.0, PLAIN: 2.5}
    row["timings"] = {name: {"median": seconds, "samples": [seconds]} for name, seconds in times.items()}
    found = {group["group"]: group for group in groups([row, measured()])}
    assert found["same, all"]["cells"] == 1
    assert found["same, M <= 16, codes of up to 4 bits"]["mean"] == pytest.approx(1.25)
    assert found["q8, M <= 16, codes of up to 4 bits"]["result"] == "MET"
    assert found["same, M <= 16, codes of up to 4 bits"]["result"] == "NOT MET"
    assert found["same, M <= 16, codes of 5 to 8 bits"]["cells"] == 0
    run = {"rows": [row, measured()], "device": {"before": {"name": "Stand-in 9000"}}}
    text = quant_gpu_section([run], ["a.json"])
    assert "| `q8`, M <= 16, codes of up to 4 bits | 1 | 2.50 | 2.50 | 2.50 |" in text
    assert "| 16, 64 |" not in text


@pytest.mark.parametrize(
    ("path", "where", "counts"),
    [
        ("same", lambda x: len(x) == 3, {"differing": 1, "batch_differing": 1, "plain_differing": 1}),
        ("same", lambda x: len(x) == 20, {"differing": 0, "batch_differing": 1, "plain_differing": 0}),
        ("q8", lambda x: len(x) == 3, {"q8": {"differing": 1, "batch_differing": 1}}),
        ("fp32", lambda x: len(x) == 3, {"fp32": {"differing": 1, "batch_differing": 1, "plain_differing": 1}}),
        ("fp32", lambda x: len(x) == 20, {"fp32": {"differing": 0, "batch_differing": 1, "plain_differing": 0}}),
    ],
)
def test_wrong_bits_are_counted(monkeypatch, path, where, counts):
    true = isogemm.linear

    def bad(x, w, **options):
        y = true(x, w, **options)
        if options.get("activations") == path and where(x):
            y[2, 15] *= 2
        return y

    monkeypatch.setattr(quant_gpu_operands.isogemm, "linear", bad)
    row = measured()
    found = row["correctness"]
    name = next(iter(counts)) if path != "same" else None
    part, want = (found[name], counts[name]) if name else (found, counts)
    assert want.items() <= part.items()
    assert wrong(row) == sum(want.values())
    assert f"bits: {wrong(row)} differ" in summary([row]).plain


def test_the_whole_batch_is_held_to_some_of_its_rows(monkeypatch):
    true = isogemm.linear

    def bad(x, w, **options):
        y = true(x, w, **options)
        return y * 2 if len(x) == quant_gpu_operands.ALONE else y

    monkeypatch.setattr(quant_gpu_operands.isogemm, "linear", bad)
    found = measured(Case("Q4_0", 20, 16, 64))["correctness"]
    assert found["differing"] == 0
    assert found["batch_differing"] > 0


def test_an_error_of_ours_is_a_row_and_peers_that_cannot_are_named(monkeypatch):
    true = isogemm.linear

    def bad(x, w, **options):
        if options.get("activations") == "same":
            raise NotImplementedError("no kernel")
        return true(x, w, **options)

    monkeypatch.setattr(quant_gpu_operands.isogemm, "linear", bad)
    row = measured(peers=Peers(SimpleNamespace(layers=lambda *_: [][0])))
    assert row["error"] == "NotImplementedError: no kernel"
    assert set(row["timings"]) == {Q8, PLAIN, TORCH} | FLOATS
    assert row["absent"] == {GEMLITE: "IndexError: list index out of range"}
    assert "absent: gemlite: IndexError" in summary([row]).plain
    assert "failed: NotImplementedError" in line(row)


def test_who_cannot_be_captured_or_checked_loses_nothing_else(monkeypatch):
    class Refusing(StandIn):
        captures = 0

        def capture(self, calls):
            self.captures += 1
            if self.captures == 2:  # the integer path's
                raise RuntimeError("no capture")
            return super().capture(calls)

    monkeypatch.setattr(quant_gpu_operands, "_check", lambda *_: [][0])
    row = measure(TINY, quick(), Refusing(), Shelf("cpu", 3, Peers(), (3,)), CEILINGS)
    assert row["error"] == "check: IndexError: list index out of range"
    assert row["absent"] == {Q8: "graph: RuntimeError: no capture"}
    assert set(row["timings"]) == {OURS, PLAIN, TORCH} | FLOATS


def test_a_peer_is_tuned_once_for_each_weight_and_its_error_is_said():
    peer = Multiplier()
    shelf = Shelf("cpu", 3, Peers(peer), (1, 3))
    rows = [measure(Case("Q4_0", m, 16, 256), quick(), StandIn(), shelf, CEILINGS) for m in (1, 3)]
    assert peer.prepared == 1
    for row in rows:
        assert row["correctness"]["apart"][GEMLITE] < 1e-2
        assert (OURS, GEMLITE) in {(v["ours"], v["peer"]) for v in row["verdicts"]}
    measure(Case("Q8_0", 1, 16, 256), quick(), StandIn(), shelf, CEILINGS)
    assert peer.prepared == 2


def test_the_kernel_of_a_row_is_the_one_that_the_call_chose(monkeypatch):
    from isogemm.backends.cuda.quant import family
    from isogemm.base import seen

    aged = []
    monkeypatch.setattr(seen, "forget", lambda: aged.append(1))
    chosen = family.QuantRun(SimpleNamespace(name="quant few"), None, (1, 2), None, None)
    monkeypatch.setattr(family, "choose", true := lambda case, *_: chosen if case.m == 1 else None)
    one, many = SimpleNamespace(path="same", m=1), SimpleNamespace(path="same", m=9)
    assert kernel_of(lambda i: family.choose(one, None)) == "same few [(1, 2)]"
    assert kernel_of(lambda i: family.choose(many, None)).startswith("dequantized weights")
    assert family.choose is true
    assert aged == [1, 1]


def test_a_name_that_cannot_be_told_costs_no_row(monkeypatch):
    from isogemm.base import seen

    monkeypatch.delattr(seen, "forget")
    assert kernel_of(lambda i: None).startswith("unknown (AttributeError")


def test_judged_by_the_interval():
    case = Case("Q4_0", 1, *BARRED[0])
    for seconds, word in ((3.0, "MET"), (2.5, "NOT MET")):
        timings = {OURS: Timing.of(OURS, [1.0] * 5, 1), PLAIN: Timing.of(PLAIN, [seconds] * 5, 1)}
        row = quant_gpu_measure._row(case, quick(), timings, None, CEILINGS, None, None, {})
        assert row["bars"] == [{"bar": f"same ≥ 2.8 {PLAIN}", "result": word}]
    timings |= {Q8: Timing.of(Q8, [0.5] * 5, 1)}
    row = quant_gpu_measure._row(case, quick(), timings, None, CEILINGS, None, None, {})
    assert [bar["result"] for bar in row["bars"]] == ["NOT MET", "MET"]


def test_codes_of_a_peer_are_those_of_the_blocks():
    rows = blocks("Q4_0", 4, 128, "cpu", 5)
    codes, scales = q4_0_codes(rows)
    want = decode(rows.numpy(), QuantizedMatrix.from_bytes(rows.numpy(), shape=(4, 128), format="Q4_0").format)
    assert np.array_equal(codes.numpy().astype(int) - 8, want.q)
    assert np.array_equal(scales.float().numpy(), want.d)


def test_groups_come_within_half_a_step():
    import torch

    weight = torch.randn(3, 128).bfloat16()
    codes, scales, zeros = grouped(weight, 64)
    wide = (codes.view(3, 2, 64).float() - zeros.float()[..., None]) * scales.float()[..., None]
    step = scales.float().max()
    assert (wide.view(3, 128) - weight.float()).abs().max() < 0.6 * step


def test_compiling_runs_every_configuration_and_no_kernel():
    class Config:
        def all_kwargs(self):
            return {"num_warps": 4}

    ran = []
    tuner = SimpleNamespace(arg_names=["a"], prune_configs=lambda options: [Config()] * 3)
    tuner.fn = SimpleNamespace(run=lambda *a, **k: ran.append((a, k)))
    _compile_all(tuner, 7, grid=(1,), warmup=False)
    assert ran == [((7,), {"warmup": True, "grid": (1,), "num_warps": 4})] * 3


def test_a_peer_s_tuner_is_put_back(monkeypatch):
    package, core, testing = ModuleType("gemlite"), ModuleType("gemlite.core"), ModuleType("triton.testing")
    tuner = SimpleNamespace(pre_hook=1, post_hook=2, do_bench=3)
    package.__version__, core.GEMLITE_TRITON_KERNELS = "9", [SimpleNamespace(kernel=[tuner])]
    testing.do_bench = lambda call, warmup, rep, quantiles: [rep]
    for name, module in (("gemlite", package), ("gemlite.core", core), ("triton.testing", testing)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    peer = GemLite()

    def failing():
        with peer._briefly():
            assert tuner.do_bench(None, None) == [5]
            assert tuner.pre_hook(1, x=2) is tuner.post_hook(1, x=2) is None
            raise RuntimeError("out")

    with pytest.raises(RuntimeError, match="out"):
        failing()
    assert (tuner.pre_hook, tuner.post_hook, tuner.do_bench) == (1, 2, 3)
    assert load_gemlite(None)[1] == "gemlite: 9"


def test_absent_peers_are_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemlite", None)
    found, words = load_gemlite(None)
    assert found is None
    assert words.startswith("gemlite: absent (")
    with pytest.raises(FileNotFoundError, match="libggml-base"):
        LlamaCuda(tmp_path)


def test_what_a_linker_misses_becomes_symbols_that_abort():
    text = "a.o: undefined reference to `_Z1fv'\nb.o: undefined reference to `_Z1fv'\nundefined reference to `_Z1gi'"
    names = undefined(text)
    assert names == ["_Z1fv", "_Z1gi"]
    assert stubs(names).count("__asm__") == 2


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(quant_gpu, "open_engine", StandIn)
    words = ("--formats", "Q8_0", "--m", "1,2", "--shapes", "16x64", "--quick", "--no-gemlite")
    return functools.partial(invoke, quant_gpu.main, *words)


def test_a_run_prints_and_writes_rows(command, tmp_path):
    result = command("--out", str(tmp_path / "r.json"), "--seed", "5")
    assert result.exit_code == 0, result.output
    assert f"{LLAMA}: absent (no --llama)" in result.output
    assert "2 of 2 cases" in result.output
    content = read_json(tmp_path / "r.json")
    assert content["device"]["after"] == {"name": "Stand-in 9000"}
    assert [row["m"] for row in content["rows"]] == [1, 2]
    assert content["rows"][0]["command"].endswith("--shapes 16x64 --quick --seed 5")


def test_no_case_begins_after_the_limit(command, tmp_path):
    result = command("--out", str(tmp_path / "r.json"), "--seconds", "1e-9")
    assert "0 of 2 cases" in result.output


@pytest.mark.parametrize("words", [("--formats", "Q9"), ("--m", "0"), ("--shapes", "16"), ("--llama", "/nowhere")])
def test_bad_usage_exits_with_2(command, words, tmp_path):
    assert command("--out", str(tmp_path / "r.json"), *words).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_failed_rows_can_be_shown():
    failed = quant_gpu_measure._row(TINY, quick(), {}, None, CEILINGS, None, "ValueError: no", {})
    console = Console(width=quant_gpu.WIDTH, record=True)
    console.print(table([failed, measured()]))
    assert "ValueError: no" in console.export_text()
