"""Plans of several products: what they say is what is launched, and they print, survive JSON and replay."""

from __future__ import annotations

import json
from collections import Counter
from ctypes import cast, py_object
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import isogemm
from isogemm.backends.cpu import pool as pools
from isogemm.backends.cpu import work
from isogemm.backends.cpu.attention import run as attention
from isogemm.backends.cpu.emit import descriptor
from isogemm.backends.cpu.gemm import launch
from isogemm.backends.cpu.quant import launch as quant_launch
from isogemm.backends.cpu.work import WorkPlan
from isogemm.backends.cuda.plans.plan import DevicePlan
from isogemm.cli import app
from isogemm.contract.attention import attention as definition
from isogemm.contract.attention import ranges
from isogemm.errors import DTypeError, OptionError, ShapeError
from isogemm.problem.forms import Mask

THREADS = 3


@pytest.fixture
def _threads():
    isogemm.set_num_threads(THREADS)


@pytest.fixture
def launched(monkeypatch):
    """(threads, chunks) of every launch; chunks of one that quantizes and multiplies are both of its."""
    found, honest = [], pools.pool()

    def run(kernel, scratch, threads, *arguments):
        chunks = arguments[-1]
        if kernel is launch.starter():  # of a product, whose template has them
            chunks = int(cast(arguments[0], py_object).value[0, descriptor.CHUNKS])
        found.append((threads, chunks))
        honest.run(kernel, scratch, threads, *arguments)

    for module in (launch, quant_launch, pools):
        monkeypatch.setattr(module, "pool", lambda: SimpleNamespace(run=run))
    return found


def drawn(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def same(got, wanted):
    return all(np.array_equal(x.view(np.int32), y.view(np.int32)) for x, y in zip(got, wanted, strict=True))


def said(plan):
    return [(step.threads, step.chunks) for step in plan.steps for _ in range(step.launches)]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("items", "m", "n", "k"), [(2, 4, 4, 4), (40, 16, 32, 24), (7, 64, 48, 80), (100, 1, 64, 64)])
def test_a_batch(items, m, n, k, launched):
    plan = isogemm.plan(m, n, k, batch=items, trans_b="N")
    a, b = drawn(items, m, k), drawn(items, k, n)
    out = plan.run(a, b)
    assert launched == said(plan)
    assert same(out, [isogemm.matmul(x, y) for x, y in zip(a, b, strict=True)])
    assert "a loop of gemm" in str(plan)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("rows", [(3, 100, 1, 57), (5,), (200, 64), (1,) * 30, (2, 0, 1)])
def test_groups(rows, launched):
    n, k = 40, 56
    plan = isogemm.plan(sum(rows), n, k, groups=rows, trans_b="N")
    a, b = [drawn(m, k) for m in rows], [drawn(k, n) for _ in rows]
    out = plan.run(a, b)
    assert [threads for threads, _ in launched] == [max(step.threads for step in plan.steps)]
    if len(rows) < 4 * THREADS and sum(rows) * n * k >= 96 * 1024:
        assert launched[0][1] == sum(step.chunks for step in plan.steps)
    assert same(out, isogemm.gemm_grouped(a, b))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("m", [1, 9, 70])
@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "Q4_K"])
def test_quantized(m, fmt, launched):
    n, k = 200, 512
    plan, x, w = isogemm.plan(m, n, k, format=fmt), drawn(m, k), isogemm.quantize(drawn(n, k), fmt)
    w.panels()
    launched.clear()
    out = plan.run(x, w)
    quantizing, product = said(plan)
    if len(launched) == 1:
        threads, chunks = launched[0]
        assert (threads, [int(x) for x in chunks]) == (product[0], [quantizing[1], product[1]])
    else:
        assert launched == [quantizing, product]
    assert same(out, isogemm.linear(x, w))
    assert str(plan.contract) == "int32/chain"
    assert f"gemm_nt_{fmt.lower()}_q8_" in str(plan)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("block", [2**20, 2**14])
@pytest.mark.parametrize(
    ("sequences", "heads", "shared", "tokens", "keys"),
    [(2, 4, 2, 9, 130), (1, 8, 8, 100, 300), (2, 2, 1, 1, 700), (1, 2, 1, 40, 256)],
)
def test_attention(sequences, heads, shared, tokens, keys, block, launched, monkeypatch):
    """Also where it goes block by block, of which the last may be smaller."""
    monkeypatch.setattr(attention, "BLOCK", block)
    plan = isogemm.plan(tokens, keys, 16, batch=sequences, heads=(heads, shared))
    q, k, v = drawn(sequences, heads, tokens, 16), *(drawn(sequences, shared, keys, 16) for _ in "kv")
    out = plan.run(q, k, v)
    assert same(out, definition(q, k, v)[0])
    if block == 2**20:
        assert launched == said(plan)
        assert plan.steps[0].launches == 1


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("mask", ["causal", "bool", "added", "window:40"])
@pytest.mark.parametrize(("tokens", "keys"), [(9, 130), (100, 300), (1, 700)])
def test_attention_with_a_mask(tokens, keys, mask, launched, monkeypatch):
    """Keys that nobody sees are in no step; blocks are cut so small that there are several."""
    monkeypatch.setattr(attention, "BLOCK", 2**14)
    plan = isogemm.plan(tokens, keys, 16, batch=2, heads=(4, 2), mask=mask)
    q, k, v = drawn(2, 4, tokens, 16), *(drawn(2, 2, keys, 16) for _ in "kv")
    given = {"bool": drawn(tokens, keys) > 0, "added": drawn(tokens, keys)}.get(mask)
    out = plan.run(q, k, v, *(() if given is None else (given,)))
    assert sorted(launched) == sorted(said(plan))
    wanted = {"causal_offset": keys - tokens} if mask == "causal" else {"mask": given}
    if mask == "window:40":
        wanted = dict(zip(("start", "stop"), ranges(Mask("window", 40).shown(tokens, keys)[None, None]), strict=True))
        rows = [{name: x[0, 0, i : i + 1] for name, x in wanted.items()} for i in range(tokens)]
        for i, row in enumerate(rows):
            alone = definition(q[:1, :, i : i + 1], k[:1], v[:1], **row)[0]
            assert same(out[:1, :, i : i + 1], alone)
    else:
        assert same(out, definition(q, k, v, **wanted)[0])
    assert mask in str(plan)
    assert WorkPlan.from_json(plan.to_json()) == plan
    if given is not None:
        with pytest.raises(ShapeError, match="operands of a replay"):
            plan.run(q, k, v)
        with pytest.raises(DTypeError, match="mask of a replay"):
            plan.run(q, k, v, given.astype(bool if mask == "added" else np.float32))


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (9, 130), (100, 300), (300, 100), (257, 256)])
@pytest.mark.parametrize("mask", [Mask(""), Mask("causal")])
@pytest.mark.parametrize(("sequences", "heads", "shared"), [(1, 1, 1), (3, 4, 2), (5, 2, 2)])
def test_blocks_of_attention_are_counted_as_they_are_taken(tokens, keys, mask, sequences, heads, shared, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 2**12)
    counted = work._cut((tokens, keys, 16), mask, sequences, heads, shared)
    walked = attention.blocks(sequences * shared, heads // shared, tokens, keys, mask.offset(tokens, keys))
    taken = Counter((places, some, seen) for _, places, _, some, seen in walked)
    assert list(counted.items()) == list(taken.items())
    monkeypatch.setattr(work, "KINDS", 4)
    few = work._cut((tokens, keys, 16), mask, sequences, heads, shared)
    assert few.total() == taken.total()
    assert max(few) == max(taken)
    assert len(few) <= 4 * 4


def test_a_plan_of_many_tokens_is_short():
    plan = isogemm.plan(2**18, 2**18, 128, heads=(8, 8), mask="causal")
    assert len(plan.steps) < 2**15
    assert sum(step.launches * step.items for step in plan.steps if step.name == "scores") == 8 * 2**18 // 4


@pytest.mark.parametrize("tokens", [1, 7, 30])
@pytest.mark.parametrize("keys", [1, 7, 30])
@pytest.mark.parametrize("width", [1, 5, 40])
def test_ranges_of_a_window_are_what_its_mask_shows(tokens, keys, width):
    mask = Mask("window", width)
    for found, want in zip(mask.seen(tokens, keys), ranges(mask.shown(tokens, keys)), strict=True):
        assert found.tolist() == want.tolist()
    assert mask.pairs(tokens, keys) == mask.shown(tokens, keys).sum()
    assert Mask("causal").pairs(tokens, keys) == Mask("window", keys).pairs(tokens, keys)


@pytest.mark.usefixtures("_threads")
def test_a_replay_takes_what_its_plan_is_of():
    swapped, halves = np.dtype(np.float32).newbyteorder(), np.float16
    x, w = drawn(2, 64), isogemm.quantize(drawn(8, 64), "Q4_0")
    plans = [
        (isogemm.plan(2, 3, 4, batch=2), (drawn(2, 2, 4), drawn(2, 4, 3))),
        (isogemm.plan(5, 3, 4, groups=[2, 3]), ([drawn(2, 4), drawn(3, 4)], [drawn(4, 3), drawn(4, 3)])),
        (isogemm.plan(4, 6, 16, heads=(2, 1)), (drawn(1, 2, 4, 16), drawn(1, 1, 6, 16), drawn(1, 1, 6, 16))),
        (isogemm.plan(2, 8, 64, format="Q4_0"), (x, w)),
    ]
    for plan, operands in plans:
        for i, operand in enumerate(operands):
            if operand is w:
                continue
            for dtype in (swapped, halves, np.float64):
                turned = [y.astype(dtype) for y in operand] if isinstance(operand, list) else operand.astype(dtype)
                with pytest.raises(DTypeError):
                    plan.run(*operands[:i], turned, *operands[i + 1 :])
            if not isinstance(operand, list):
                with pytest.raises(DTypeError, match="mask"):
                    plan.run(*operands[:i], np.ma.masked_array(operand), *operands[i + 1 :])
        plan.run(*operands)
    with pytest.raises(OptionError, match="format of a replay"):
        plans[-1][0].run(x, drawn(8, 64))


@pytest.mark.parametrize("text", ["x", "[]", "3", None])
def test_what_is_no_plan_is_refused(text):
    for kind in (WorkPlan, DevicePlan):
        with pytest.raises(OptionError, match="plan: limit"):
            kind.from_json(text)


@pytest.mark.parametrize(("name", "value"), [("numeric", {}), ("numeric", 3), ("form", "x"), ("about", 5), ("m", "a")])
def test_a_damaged_plan_is_refused(name, value):
    with pytest.raises(OptionError, match="plan: limit: what to_dict"):
        WorkPlan.from_dict(isogemm.plan(4, 8, 32, batch=5).to_dict() | {name: value})


@pytest.mark.usefixtures("_threads")
def test_a_plan_is_a_value():
    made = [
        isogemm.plan(4, 8, 32, batch=5, dtype="bfloat16"), isogemm.plan(9, 8, 32, groups=(4, 5)),
        isogemm.plan(4, 8, 32, format="Q5_0"), isogemm.plan(4, 8, 32, heads=(4, 2), batch=3),
    ]  # fmt: skip
    assert [plan.form for plan in made] == ["batched", "grouped", "quantized", "attention"]
    for plan in made:
        again = WorkPlan.from_json(plan.to_json())
        assert (again, again.digest, hash(again)) == (plan, plan.digest, hash(plan))
        assert plan.alternatives
        data = plan.to_dict() | {"steps": []}
        with pytest.raises(OptionError, match="what this machine plans"):
            WorkPlan.from_dict(data)
    assert len({plan.digest for plan in made}) == 4
    with pytest.raises(ShapeError, match="operands of a replay"):
        made[0].run(drawn(5, 4, 33), drawn(5, 33, 8))
    isogemm.set_num_threads(2)
    with pytest.raises(OptionError, match="threads of a replay"):
        made[1].run([], [])


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(OptionError, match="form of a plan"):
        isogemm.plan(4, 8, 32, groups=(4,), format="Q4_0")
    with pytest.raises(OptionError, match="batch, groups") as two:
        isogemm.plan(4, 8, 32, batch=2, groups=(1, 3))
    assert two.value.value == ["batch", "groups"]
    with pytest.raises(ShapeError, match="rows that sum to m, 4"):
        isogemm.plan(4, 8, 32, groups=(4, 5))
    with pytest.raises(ShapeError, match=r"multiple of its block, 32"):
        isogemm.plan(4, 8, 33, format="Q4_0")
    with pytest.raises(ShapeError, match="heads"):
        isogemm.plan(4, 8, 32, heads=(4, 3))
    for mask in ("windows:3", "window:0", "causal:4", 7):
        with pytest.raises(OptionError, match=r"mask: limit: causal, window:W, bool or added"):
            isogemm.plan(4, 8, 32, heads=(4, 2), mask=mask)
    with pytest.raises(OptionError, match="mask: limit: with heads"):
        isogemm.plan(4, 8, 32, mask="causal")
    with pytest.raises(OptionError, match="contract of a plan with a format"):
        isogemm.plan(4, 8, 32, format="Q4_0", contract="fma/chain")
    with pytest.raises(OptionError, match="plan of batched products: limit: packed=False"):
        isogemm.plan(4, 8, 32, batch=3, packed=True, device="cuda")


def test_the_command_plans_all_forms():
    words = {
        "batched": "--batch 32", "grouped": "--groups 4,12", "quantized": "--format Q4_K", "attention": "--heads 8,2"
    }  # fmt: skip
    for form, option in words.items():
        result = CliRunner().invoke(app, ["plan", "16", "64", "256", *option.split(), "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)["form"] == form
    shown = CliRunner().invoke(app, ["plan", "16", "64", "256", "--batch", "32", "--device", "cuda", "--dtype", "bf16"])
    assert shown.exit_code == 0
    assert "batch 32" in shown.output
