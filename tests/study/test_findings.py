"""What the studies conclude from rows: where arithmetic takes over, verdicts on claims, facts, counters of kernels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.study import fakes

from isogemm.contract import compare
from isogemm.lab.models import model
from isogemm.quant.matrix import QuantizedMatrix
from isogemm.study.catalog import claims, dispatch, why
from isogemm.study.catalog.decode import crossover, seven, step_bytes
from isogemm.study.engine import RunOptions, StudyRun, run
from isogemm.study.facts import mended_facts
from isogemm.study.once import run_once
from isogemm.study.weights import checked, format_bytes, make_weight


def row(key, facts, timings, clocks=None, **others):
    """A row as the engine leaves it, with medians alone."""

    def of(times):
        return {way: {"median": seconds, "p5": seconds, "p95": seconds} for way, seconds in times.items()}

    clocks = {clock: of(times) for clock, times in (clocks or {}).items()}
    return {
        "name": key, "command": f"isogemm study claims --case '{key}'", "facts": facts, "clock": "device",
        "timings": of(timings), "clocks": clocks, **others,
    }  # fmt: skip


def test_arithmetic_takes_over_where_the_lines_meet():
    flat_then_rising = {m: max(1e-3, m * 1e-4) for m in (1, 2, 4, 8, 16, 64, 512)}
    assert crossover(flat_then_rising) == pytest.approx(10)


def test_a_token_reads_seven_products_a_layer_and_the_head():
    llama = model("Llama-3.1-8B")
    assert len(seven(llama)) * llama.layers == 224
    assert sum(n * k for n, k in seven(llama)) == sum(x.n * x.k for x in llama.linears()[:-1])
    assert step_bytes(llama, "Q4_0") == 18 * (32 * sum(n * k for n, k in seven(llama)) + 128256 * 4096) // 32
    assert [round(format_bytes(kind, 4096, 4096) / 1e6, 1) for kind in ("F16", "Q8_0", "Q4_0")] == [33.6, 17.8, 9.4]


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q2_K"])
def test_weights_repeat_their_rows_in_memory_of_their_own(kind):
    one, other = (make_weight(kind, 100, 256, 3) for _ in range(2))
    floats = [w.dequantize() if isinstance(w, QuantizedMatrix) else w for w in (one, other)]
    assert compare.differing(*floats) == 0
    assert np.array_equal(floats[0][64:], floats[0][:36])
    assert not np.shares_memory(getattr(one, "rows", one), getattr(other, "rows", other))


def test_a_wrong_element_of_a_quantized_product_is_counted():
    import isogemm

    w, x = make_weight("Q4_0", 64, 64, 1), np.random.default_rng(0).standard_normal((3, 64), np.float32)
    right = isogemm.linear(x, w)
    wrong = right.copy()
    wrong[2, 5] = np.nextafter(wrong[2, 5], np.float32(9))
    beside = right.copy()
    beside[1, 40] = np.nextafter(beside[1, 40], np.float32(9))  # no part of the sample
    found = checked(w, x, [right, wrong, beside], "int32/chain")
    assert [(f["differing"], f["from_first"]) for f in found] == [(0, 0), (1, 1), (0, 1)]


def claim(text):
    return next(each for each in claims.CLAIMS if text in each.text)


@pytest.mark.parametrize(
    ("loop", "profiled", "verdict"),
    [(2.4, None, claims.HOLDS), (1.0, 2.5, claims.ELSEWHERE), (1.0, 300.0, claims.NOT), (None, None, claims.MISSING)],
)
def test_a_claim_holds_by_its_own_clock_or_elsewhere_or_not(loop, profiled, verdict):
    rows = []
    if loop:
        clocks = {"profiled": {"loop torch": profiled, "strided torch": 1.0}} if profiled else {}
        facts = {"study": "four-methods", "N": 1024, "mode": "fp32", "k": 16}
        rows = [row("four-methods: N=1024", facts, {"loop torch": loop, "strided torch": 1.0}, clocks)]
    found, seen = claims.judge(claim("2.4x"), rows)
    assert found == verdict
    assert len(seen) == {claims.HOLDS: 1, claims.ELSEWHERE: 2, claims.NOT: 1, claims.MISSING: 0}[verdict]


def test_the_table_has_every_claim_with_a_verdict_a_reason_and_a_command():
    facts = {"study": "decode", "part": "weights", "format": "F16", "m": 4, "n": 8, "k": 8}
    rows = [row("decode: F16", facts, {"one by one isogemm": 4.0, "together isogemm": 1.0})]
    table, mended = claims.figures(rows)
    lines = {line["claim"]: line for line in table.table}
    assert len(lines) == len(claims.CLAIMS) == 14
    for said in ("2.4x", "20 to 30 %", "330x", "150x", "20x", "2.5x", "7.3 to 8.6x", "35 to 150x", "4x as", "3.6x"):
        assert sum(said in text for text in lines) >= 1
    for said in ("M = 16 to 64", "251", "array of pointers", "PEDANTIC"):
        assert sum(said in text for text in lines) == 1
    assert all(line["reason"].endswith(".") and line["command"].startswith("isogemm study") for line in lines.values())
    measured = [line for line in lines.values() if line["verdict"] != claims.MISSING]
    assert [line["here"] for line in measured] == ["4 (isogemm, device time, F16)"]
    assert table.title.startswith("14 published numbers: holds: 1, holds elsewhere: 0")
    assert len(mended.table) == 10


def test_claims_are_judged_by_the_rows_of_other_studies_where_none_were_measured():
    def run(study, name, rows):
        return StudyRun(study, {"name": name, "device": "cuda"}, rows)

    batch = {"loop torch": 2.4, "strided torch": 1.0}
    own = row("N=1024 k=4 fp32", {"N": 1024, "mode": "fp32", "k": 4}, batch)
    wide = row("N=2560 k=32 fp32", {"N": 2560, "mode": "fp32", "k": 32}, batch)
    other = row("70B", {"model": "Llama-3.1-70B", "phase": "decode", "product": "scores", "T": 1024}, batch)
    runs = [run("four-methods", "one", [own, wide]), run("attention", "one", [other]), run("claims", "two", [])]
    (found,) = claims.claims_of([*runs, run("four-methods", "two", [own])])
    assert (found.study, found.site["name"]) == ("claims", "one")
    assert [each["name"] for each in found.rows] == ["four-methods: N=1024 k=4 fp32"]
    assert claims.judge(claim("2.4x"), found.rows)[0] == claims.HOLDS
    assert own["name"] == "N=1024 k=4 fp32"


def test_the_mended_facts_are_worked_out():
    found = {line["the sources say"]: line["worked out here"] for line in mended_facts()}
    assert found["byte j of a Q4_0 block holds elements 2 j and 2 j + 1"] == "elements 3 and 19 are in byte 3"
    assert found["grouped heads are one strided batch"].endswith("0, 1")
    assert found["a wrong type of alpha shows as noise"].startswith("0 or 1.875")
    assert found["head_dim = hidden / heads"] == "Qwen3-4B: 128, and 2560 / 32 = 80"
    assert "Q5_0" in found["a row may end in a part of a super-block"]
    assert "T = 1024: 102.4 and 51.2" in found.values()


def test_counters_are_a_table_and_else_a_reason():
    facts = {"limits": {"threads": 2048}, "N": 1024, "k": 16, "cache": 1}
    case = row("N=1024", facts, {"loop torch": 1.0}, counters={"loop torch": {"HBM %": 61.25, "barrier": 0.5}})
    figure = why.figures([case])[-1]
    assert figure.title == "Memory is busiest, at 61.2 %, with loop torch at N=1024"
    assert figure.table == [{"case": "N=1024", "way": "loop torch", "HBM %": "61.2", "barrier": "0.5"}]
    refused = case | {"counters": {}, "no_counters": "DeviceError: counters: limit: ncu"}
    assert why.figures([refused])[-1].sentence.startswith("DeviceError: counters: limit: ncu")


def test_without_ncu_a_row_that_is_inspected_says_so(monkeypatch, tmp_path):
    queue = fakes.Queue()
    monkeypatch.setattr("isogemm.lab.clock.time", queue.time)
    monkeypatch.setenv("PATH", str(tmp_path))
    declared = fakes.study(queue, sizes=(1,))
    inspected = [replace(case, inspect=True) for case in declared.cases(None, False)]
    found = run(replace(declared, cases=lambda site, quick: inspected), fakes.site(queue), RunOptions())
    assert found.rows[0]["counters"] == {}
    assert "ncu" in found.rows[0]["no_counters"]
    assert found.rows[0]["error"] is None


def test_a_profiler_sees_one_call_of_each_way_in_its_range_and_of_a_loop_two_products():
    queue, said = fakes.Queue(), []
    case = fakes.study(queue, sizes=(3,)).cases(None, False)[0]
    cuda = SimpleNamespace(
        synchronize=lambda: said.append(round(queue.worked, 9)),
        profiler=SimpleNamespace(start=lambda: said.append("start"), stop=lambda: said.append("stop")),
        nvtx=SimpleNamespace(range_push=said.append, range_pop=lambda: said.append("end")),
    )
    assert run_once(case, fakes.site(queue), 0, cuda) == ["batch", "loop"]
    batch, loop = ["start", "batch", 9e-4, "end", "stop"], ["start", "loop", 15e-4, "end", "stop"]
    assert said == [6e-4, *batch, 13e-4, *loop]


def test_spellings_of_one_product_agree_and_say_what_ran():
    torch = pytest.importorskip("torch")
    from isogemm.lab.profiler import operators

    x = torch.ones(2, 3, 4)
    assert operators(lambda: torch.matmul(x, x.transpose(1, 2))) == ["aten::bmm"]
    assert operators(lambda: torch.nn.functional.linear(x[0], x[1])) == ["aten::mm"]
    for spelled in dispatch.spellings(3, 5, 4, 2):
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(shape, generator=generator) for shape in (spelled.left, spelled.right))
        exact = spelled.exact(left.double().numpy(), right.double().numpy())
        for name, call in spelled.calls.items():
            assert np.allclose(call(left, right).numpy(), exact, atol=1e-4), (spelled.name, name)
