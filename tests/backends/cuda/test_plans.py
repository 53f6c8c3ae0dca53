"""Plans of every form for a GPU that is described: what a live one's choosers say, replayed there alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.planner.fakes import H200, FakeMachine
from typer.testing import CliRunner

import isogemm
from isogemm.backends.cuda.attention.choose import ranked
from isogemm.backends.cuda.driver import facts
from isogemm.backends.cuda.gemm import choose as products
from isogemm.backends.cuda.plans.plan import SCHEMA, DevicePlan
from isogemm.backends.cuda.plans.work import DESCRIBED, GpuPlanner
from isogemm.backends.cuda.quant.family import FAMILIES
from isogemm.cli import app
from isogemm.errors import ContractError, DeviceError, OptionError, ShapeError
from isogemm.planner.admission import Admissions
from isogemm.planner.products import Chooser
from isogemm.planner.records import Records
from isogemm.planner.tables import shipped_tables

pytest.importorskip("torch")
FORMS = {
    "": ((16, 4096, 4096), {}),
    "batched": ((128, 128, 64), {"batch": 8}),
    "grouped": ((160, 4096, 2048), {"groups": (3, 100, 0, 57)}),
    "quantized": ((16, 4096, 4096), {"format": "Q4_K"}),
    "attention": ((1, 8192, 128), {"batch": 4, "heads": (32, 8)}),
    "causal": ((512, 512, 128), {"heads": (8, 8), "mask": "causal"}),
    "window": ((512, 512, 64), {"heads": (8, 2), "mask": "window:200"}),
    "added": ((5, 77, 40), {"heads": (2, 2), "mask": "added"}),
}


def planned(form, device, dtype="bfloat16", **options):
    extents, about = FORMS[form]
    found = isogemm.plan(*extents, dtype=dtype, device=device, **about | options)
    assert isinstance(found, DevicePlan)
    return found


@pytest.mark.parametrize("device", DESCRIBED)
@pytest.mark.parametrize("form", FORMS)
def test_a_plan_needs_no_gpu(form, device):
    plan = planned(form, device)
    assert (plan.device, plan.here) == (DESCRIBED[device].name, False)
    again = DevicePlan.from_json(plan.to_json())
    assert (again, again.digest, str(again), hash(again)) == (plan, plan.digest, str(plan), hash(plan))
    assert plan.digest != replace(plan, config="another").digest
    assert plan.alternatives
    for name, why in plan.alternatives:
        assert f"{name}: {why}" in str(plan)
    assert plan.form == {"causal": "attention", "window": "attention", "added": "attention"}.get(form, form)


def test_names_of_devices_may_be_in_capitals():
    assert isogemm.plan(16, 64, 64, device="CPU") == isogemm.plan(16, 64, 64)
    for name in ("h200", "h100"):
        assert planned("", name.swapcase()).digest == planned("", name).digest


def test_the_same_words_everywhere():
    for m, n, word in (
        (1, 4096, "gemv"),
        (1, 32000, "wide gemv"),
        (16, 4096, "batched gemv"),
        (17, 4096, "tiled gemm"),
    ):
        for device, options in (("cpu", {}), ("cpu", {"format": "Q4_0"}), ("h200", {}), ("h100", {"format": "Q4_0"})):
            kernel = str(isogemm.plan(m, n, 2560, dtype="bfloat16", device=device, **options))
            assert f", a {word}\n" in kernel or f", {word}, " in kernel or f", a {word}," in kernel, (device, kernel)
        groups = isogemm.plan(3 * m, n, 2560, dtype="bfloat16", device="h200", groups=(m, m, m))
        assert f", a {word}\n" in str(groups)


@pytest.mark.parametrize("device", DESCRIBED)
def test_a_described_device_is_asked_what_a_live_one_is(device, monkeypatch, tmp_path):
    """The same choosers on a device with these facts, which is there."""
    wanted = {
        (form, dtype): planned(form, device, dtype) for form in list(FORMS)[2:] for dtype in ("bfloat16", "float16")
    }
    given = DESCRIBED[device]
    machine = FakeMachine({**H200, "device": given.name})
    here = Chooser(Admissions(machine, Records(tmp_path)), products.FAMILIES.found, shipped_tables())
    here._arithmetic = "tensor_core:sm90"
    monkeypatch.setattr(facts, "device", lambda ordinal: given)
    monkeypatch.setattr(facts, "count", lambda: 1)
    monkeypatch.setattr(products, "_choosers", {0: here})
    for (form, dtype), plan in wanted.items():
        found = planned(form, "cuda:0", dtype)
        assert found.here
        assert replace(found, here=False) == plan
    case = GpuPlanner("cuda")._case(
        (1, 8192, 128),
        ("bfloat16",) * 3,
        wanted["attention", "bfloat16"].numeric,
        isogemm.problem.forms.Mask(""),
        4,
        32,
        8,
    )
    assert wanted["attention", "bfloat16"].family == f"attention {ranked(case)[0]}"


PRODUCTS = {
    "aligned": ((100, 3000, 3000), {}),
    "few": ((5, 2560, 7168), {"out_dtype": "float32"}),
    "float16": ((700, 1152, 9600), {"dtype": "float16", "trans_b": "N"}),
    "batch": ((100, 512, 4096), {"batch": 4}),
    "an odd K": ((100, 3001, 3001), {}),
    "an odd K, many rows": ((3000, 3001, 3001), {}),
    "leaves": ((40, 3000, 9000), {"contract": "tensor_core:sm90/leaf512"}),
    "a tree": ((100, 3000, 3000), {"contract": "tensor_core:sm90/tree8"}),
    "timed": ((16, 2560, 4096), {}),
    "near what was timed": ((15, 2560, 4096), {}),
    "no model": ((16, 2560, 4096), {"contract": "fma/chain"}),
    "no model, leaves": ((16, 2560, 4096), {"contract": "fma/leaf64"}),
    "float32": ((100, 3000, 3000), {"dtype": "float32"}),
    "rows of tf32": ((33, 2560, 5000), {"dtype": "float32", "contract": "tf32x3:sm90/chain"}),
}


@pytest.mark.parametrize("device", DESCRIBED)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_described_device_s_kernel_is_its_chooser_s(name, device, monkeypatch, tmp_path):
    """One with these facts that is there asks for the same kernels in the same order, whatever says their time."""
    extents, options = PRODUCTS[name]
    given = {"dtype": "bfloat16"} | options
    plan = isogemm.plan(*extents, device=device, **given)
    machine = FakeMachine({**H200, "device": DESCRIBED[device].name})
    here = Chooser(Admissions(machine, Records(tmp_path)), products.FAMILIES.found, shipped_tables())
    here._arithmetic = "tensor_core:sm90"
    monkeypatch.setattr(facts, "device", lambda ordinal: DESCRIBED[device])
    monkeypatch.setattr(facts, "count", lambda: 1)
    monkeypatch.setattr(products, "_choosers", {0: here})
    found = isogemm.plan(*extents, device="cuda:0", **given)
    assert (plan.family, plan.config, plan.numeric) == (found.family, found.config, found.numeric)
    assert plan.alternatives == found.alternatives
    assert plan.reason.startswith(found.reason)
    if "model" in found.reason:
        assert plan.expected_us == found.expected_us
    else:
        assert name in ("timed", "near what was timed", "no model", "no model, leaves", "rows of tf32")


def test_where_calls_may_come_to_another_kernel_the_plan_says_so():
    foreseen = "a model of its time on 132 multiprocessors; first uses there time it against others"
    for name, said in (
        ("aligned", f"{foreseen}, cuBLASLt's among them"), ("a tree", foreseen), ("float32", foreseen),
        ("timed", "table h200.json"), ("no model", "safe: no table has a kernel for it"),
    ):  # fmt: skip
        extents, options = PRODUCTS[name]
        assert isogemm.plan(*extents, device="h200", **{"dtype": "bfloat16"} | options).reason == said


def test_multiprocessors_are_the_description_s(monkeypatch):
    """Few rows of a quantized weight, and walks of attention, are cut for the multiprocessors that there are."""
    long = {"dtype": "bfloat16", "device": "h100", "batch": 75, "heads": (2, 2)}
    before = planned("quantized", "h100"), isogemm.plan(16, 32768, 128, **long)
    monkeypatch.setitem(DESCRIBED, "h100", replace(DESCRIBED["h100"], multiprocessors=60))
    after = planned("quantized", "h100"), isogemm.plan(16, 32768, 128, **long)
    assert before[0].config != after[0].config
    assert [plan.family for plan in (before[1], after[1])] == ["attention few", "attention hopper"]
    assert "60 multiprocessors" in str(after[0])


def test_another_device_s_table_says_neither_times_nor_verdicts():
    one, other = planned("", "h200"), planned("", "h100")
    assert (one.family, one.config) == (other.family, other.config)
    assert one.expected_us is not None
    assert other.expected_us is None
    assert one.admission.startswith("admitted")
    assert other.admission == "tried on golden products at first use"
    assert "of another device" in other.reason
    library = isogemm.plan(2048, 4096, 4096, dtype="bfloat16", device="h200")
    assert library.family == "cublaslt"
    assert isogemm.plan(2048, 4096, 4096, dtype="bfloat16", device="h100").family != "cublaslt"


@pytest.mark.parametrize(("m", "n", "k"), [(1, 151936, 2560), (16, 30000, 4104), (4, 1000, 1000), (64, 8192, 3000)])
def test_no_time_is_expected_that_memory_does_not_allow(m, n, k):
    plan = isogemm.plan(m, n, k, dtype="bfloat16", device="h200")
    assert plan.reason.startswith("a model of its time")
    assert plan.bound == "memory"
    assert plan.bound_us < plan.expected_us < 1.5 * (plan.bound_us + 3)
    others = re.findall(r"time, ([0-9.]+) us", " ".join(why for _, why in plan.alternatives))
    assert others
    assert all(float(us) >= float(f"{plan.expected_us:.3g}") for us in others)


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_elsewhere_is_refused(form):
    plan, (_, about) = planned(form, "h200"), FORMS[form]
    m, n, k = plan.m, plan.n, plan.k
    shapes = {"": [(m, k), (k, n)], "batched": [(8, m, k), (8, k, n)]}.get(form)
    if form == "grouped":
        operands = [[np.empty((rows, k), np.float32) for rows in about["groups"]], [np.empty((k, n), np.float32)] * 4]
    elif form == "quantized":
        operands = [np.empty((m, k), np.float32), isogemm.quantize(np.zeros((n, k), np.float32), "Q4_K")]
    else:
        heads, shared = about.get("heads", (0, 0))
        b = about.get("batch", 1)
        shapes = shapes or [(b, heads, m, k), (b, shared, n, k), (b, shared, n, k), *[(m, n)] * (form == "added")]
        operands = [np.empty(shape, np.float32) for shape in shapes]
    with pytest.raises(DeviceError, match="device of a replay: limit: NVIDIA H200, the plan's; got: the CPU"):
        plan.run(*operands)
    with pytest.raises(ShapeError, match="operands of a replay"):
        plan.run(*operands[:-1])


def test_what_no_gpu_plans_is_refused():
    with pytest.raises(ContractError, match="contract of groups in one launch"):
        planned("grouped", "h200", contract="tensor_core:sm90/tree8")
    with pytest.raises(ContractError, match="contract of attention: limit: a chain"):
        planned("attention", "h200", contract="tensor_core:sm90/leaf64")
    for form in ("", "grouped", "attention"):
        with pytest.raises(ContractError, match="H200: limit: tensor_core:sm90, the arithmetic of its tensor cores"):
            planned(form, "h200", contract="tensor_core:sm80/chain")
    with pytest.raises(DeviceError, match=r"kernel on NVIDIA H200.*none for fma/lanes32"):
        planned("", "h200", dtype="float32", contract="fma/lanes32")
    with pytest.raises(OptionError, match="contract of a plan with a format"):
        planned("quantized", "h100", contract="fma/chain")
    for name, nearest in (("h300", "h100, a plan"), ("A100", "h100, a plan of another GPU"), ("cuda:x", "cuda$")):
        legal = "limit: cpu, webgpu; cuda or cuda:N, a GPU of this machine; h200 and h100, which need not be here"
        with pytest.raises(OptionError, match=f"no device is called '{name.lower()}'.*{legal}.*choice: ({nearest})"):
            planned("", name)
    with pytest.raises(OptionError, match="packed and threads"):
        planned("attention", "h100", threads=2)
    data = planned("grouped", "h100").to_dict()
    for wrong in (
        data | {"schema": "isogemm.device_plan.v1"},
        data | {"extra": 1},
        {**data, "schema": SCHEMA} | {"m": 1},
    ):
        if wrong.get("m") == 1:
            wrong.pop("family")
        with pytest.raises(OptionError, match=f"plan: limit: schema {SCHEMA}"):
            DevicePlan.from_dict(wrong)


def test_a_float32_attention_has_one_kernel():
    plan = planned("attention", "h200", dtype="float32")
    assert (plan.family, str(plan.contract)) == ("attention fma", "fma/chain")
    assert FAMILIES.found["quant int"].name == planned("quantized", "h200", dtype="float32").family


def test_the_command_plans_for_a_named_gpu():
    words = {
        "grouped": "--groups 4,12", "quantized": "--format Q4_K", "attention": "--heads 8,2 --mask window:9"
    }  # fmt: skip
    for form, option in words.items():
        given = ["plan", "16", "64", "256", *option.split(), "--device", "h100", "--dtype", "bf16", "--json"]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 0, result.output
        found = json.loads(result.output)
        assert (found["schema"], found["form"], found["device"]) == (SCHEMA, form, DESCRIBED["h100"].name)


@pytest.mark.parametrize("device", DESCRIBED)
@pytest.mark.parametrize("form", ["", "batched"])
def test_float32_products_are_planned_by_the_model_that_chooses_there(form, device, monkeypatch):
    """They are in no table: kernels are chosen by a model of their time, which needs no GPU either."""
    plan = planned(form, device, dtype="float32")
    assert (plan.family, str(plan.contract), plan.here) == ("sgemm", "fma/chain", False)
    assert plan.reason.startswith("a model of its time on 132 multiprocessors")
    assert plan.admission == "tried on golden products at first use"
    assert plan.expected_us is not None
    assert plan.alternatives
    monkeypatch.setitem(DESCRIBED, device, replace(DESCRIBED[device], multiprocessors=40))
    fewer = planned(form, device, dtype="float32")
    assert fewer.expected_us is not None
    assert fewer.expected_us > plan.expected_us
