"""Plans for a GPU: what the table and the records say, with a GPU and without one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planner.fakes import H200, FakeFamily, FakeMachine, linear

import isogemm
from isogemm.backends.cuda.driver import facts as device_module
from isogemm.backends.cuda.gemm import choose as choose_module
from isogemm.backends.cuda.plans import work as module
from isogemm.backends.cuda.plans.plan import DevicePlan, explain_offline, explain_on
from isogemm.errors import DeviceError, OptionError, ShapeError
from isogemm.planner.admission import Admissions, golden_digest
from isogemm.planner.products import Chooser, Ranking
from isogemm.planner.records import Records
from isogemm.planner.tables import Admitted, Bucket, DeviceLimits, LibraryRange, Table, TunedRow, Use
from isogemm.planner.trials import variant_of
from isogemm.problem.numeric import numeric_key

LINEAR = linear(16, 4096, 2560)
TABLE = Table(
    "h200.json",
    {**H200, "golden": golden_digest()},
    "2026-11-21",
    "tensor_core:sm90",
    DeviceLimits(4000.0, {"tensor_core": 800.0}),
    (
        TunedRow(
            numeric_key(LINEAR),
            (Bucket(16, (Use("f", "small"),)), Bucket(4096, (Use("library", "algo"), Use("f", "large")))),
            {16: 8.0, 4096: 200.0},
        ),
    ),
    (Admitted("f", "f-v1", variant_of(LINEAR), ("small",), "2026-11-20"),),
    (LibraryRange("library", "library-v1", numeric_key(LINEAR), variant_of(LINEAR), "algo", 17, 4096, "2026-11-21"),),
)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "count", lambda: 0)
    monkeypatch.setattr(module, "shipped_tables", lambda: (TABLE,))
    families = {"f": FakeFamily("f", offered=("small", "large")), "library": FakeFamily("library", offered=("algo",))}
    monkeypatch.setattr(choose_module, "FAMILIES", SimpleNamespace(found=families))


def on_device(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> FakeFamily:
    """A GPU whose family "f" is right; returns the family."""
    f, library = FakeFamily("f", offered=("small", "large")), FakeFamily("library", offered=("algo",))
    machine = FakeMachine({**H200, **changes})
    here = Chooser(Admissions(machine, Records(folder)), {"f": f, "library": library}, [TABLE])
    monkeypatch.setattr(device_module, "count", lambda: 1)
    monkeypatch.setattr(choose_module, "_choosers", {0: here})
    return f


def test_a_plan_without_a_gpu_is_the_shipped_table_s(without_gpu: None) -> None:
    p = isogemm.plan(16, 4096, 2560, dtype="bfloat16", device="cuda")
    assert isinstance(p, DevicePlan)
    assert (p.family, p.config, p.reason, p.expected_us) == ("f", "small", "table h200.json", 8.0)
    assert p.admission == "admitted 2026-11-20, table h200.json"
    assert str(p.contract) == "tensor_core:sm90/chain"
    text = str(p)
    for part in ("NVIDIA H200, as described: that GPU is not here", "f [small]", "8 us", "memory: 5.", "m plays"):
        assert part in text
    assert p.bound_us == pytest.approx((16 * 2560 + 2560 * 4096 + 16 * 4096) * 2 / 4e6)


def test_m_picks_the_kernel_and_not_the_numbers(without_gpu: None) -> None:
    one, many = (isogemm.plan(m, 4096, 2560, dtype="bfloat16", device="cuda") for m in (1, 4096))
    assert one.numeric == many.numeric
    assert isinstance(many, DevicePlan)
    assert (many.family, many.config, many.bound) == ("library", "algo", "compute")
    assert "2026-11-21" in many.admission


def test_a_library_outside_its_range_is_not_planned(without_gpu: None) -> None:
    p = isogemm.plan(5000, 4096, 2560, dtype="bfloat16", device="cuda")
    assert isinstance(p, DevicePlan)
    assert (p.family, p.config) == ("f", "large")
    assert "first use" in p.admission


def test_where_a_branch_s_kernel_does_not_serve_the_plan_says_so(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was admitted for other rows alone gives way to another kernel."""
    narrow = replace(TABLE, library=(replace(TABLE.library[0], low=4096),))
    monkeypatch.setattr(module, "shipped_tables", lambda: (narrow,))
    for m, kernel in ((4000, "f"), (4096, "library")):
        p = isogemm.plan(m, 4096, 2560, dtype="bfloat16", device="cuda")
        assert isinstance(p, DevicePlan)
        assert p.family == kernel
        assert ("-> if", "M >= 17: library [algo]") in p.rows()
        assert (kernel == "f") == ("as the branch's was admitted" in str(p))


def test_a_near_product_s_time_is_brought_to_this_one_s_bound(without_gpu: None) -> None:
    p = isogemm.plan(16, 8192, 2560, dtype="bfloat16", device="cuda")
    assert isinstance(p, DevicePlan)
    assert p.reason == "default: as for n 4096, k 2560 in h200.json"
    assert p.expected_us == pytest.approx(8.0 * 2, rel=0.01)


def test_a_time_is_not_scaled_far(without_gpu: None) -> None:
    p = isogemm.plan(16, 300, 200, dtype="bfloat16", device="cuda")
    assert isinstance(p, DevicePlan)
    assert p.expected_us is None
    assert "not measured" in str(p)


def test_a_plan_is_data(without_gpu: None) -> None:
    from rich.console import Console

    p = isogemm.plan(16, 4096, 2560, dtype="bfloat16", device="cuda")
    content = json.loads(p.to_json())
    assert content["schema"] == "isogemm.device_plan.v2"
    assert content["numeric"]["contract"] == "tensor_core:sm90/chain"
    assert (content["family"], content["expected_us"], content["here"]) == ("f", 8.0, False)
    console = Console(width=120)
    with console.capture() as printed:
        console.print(p)
    assert "plan 16 x 4096 x 2560 on NVIDIA H200" in printed.get()


def test_what_the_table_does_not_have_is_an_error(without_gpu: None) -> None:
    choose_module.FAMILIES.found["f"].legal = lambda product, config: False
    with pytest.raises(DeviceError, match="none for tensor_core:sm90/tree4"):
        isogemm.plan(5000, 4096, 2560, dtype="bfloat16", contract="tensor_core:sm90/tree4", device="cuda")
    with pytest.raises(DeviceError, match="device 1"):
        isogemm.plan(16, 4096, 2560, dtype="bfloat16", device="cuda:1")


def test_no_gpu_and_no_table_is_an_error(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shipped_tables", lambda: ())
    with pytest.raises(DeviceError, match="a GPU, or a shipped tuning table"):
        isogemm.plan(16, 4096, 2560, dtype="bfloat16", device="cuda")


@pytest.mark.parametrize("options", [{"packed": True}, {"threads": 2}], ids=str)
def test_options_of_the_cpu_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="device='cpu'"):
        isogemm.plan(16, 4096, 2560, device="cuda", **options)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1", ""])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(OptionError, match="cuda:N"):
        isogemm.plan(16, 4096, 2560, device=device)


def test_products_of_nothing_have_no_kernel() -> None:
    with pytest.raises(ShapeError, match="at least 1"):
        isogemm.plan(16, 0, 2560, device="cuda")


def test_a_plan_on_a_gpu_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    f = on_device(monkeypatch, tmp_path)
    p = isogemm.plan(16, 4096, 2560, dtype="bfloat16", device="cuda")
    assert isinstance(p, DevicePlan)
    assert (p.here, p.family, p.config, p.expected_us) == (True, "f", "small", 8.0)
    assert p.admission == "admitted 2026-11-20, table h200.json"
    other = isogemm.plan(5000, 4096, 2560, dtype="bfloat16", device="cuda")
    assert isinstance(other, DevicePlan)
    assert (other.config, other.admission) == ("large", "tried on golden products at first use")
    assert not f.runs
    choose_module.choose(replace(LINEAR, m=5000), 0)
    again = isogemm.plan(5000, 4096, 2560, dtype="bfloat16", device="cuda")
    assert isinstance(again, DevicePlan)
    assert again.admission.startswith("admitted 20")
    assert again.admission.endswith("a trial in this process")


def test_a_plan_on_a_gpu_with_other_software(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_device(monkeypatch, tmp_path, driver="590")
    small, large = (isogemm.plan(m, 4096, 2560, dtype="bfloat16", device="cuda") for m in (16, 4096))
    assert isinstance(small, DevicePlan)
    assert isinstance(large, DevicePlan)
    assert (small.config, small.admission) == ("small", "tried on golden products at first use")
    assert (large.family, large.config) == ("f", "large"), "a stale algorithm of a library was planned"


def test_a_kernel_that_was_refused_is_not_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.planner.fakes import flip

    f = on_device(monkeypatch, tmp_path, driver="590")
    f.faults["small"] = flip()
    choose_module.choose(LINEAR, 0)
    p = explain_on(LINEAR, choose_module.chooser(0))
    assert p.config != "small"


def test_a_native_contract_says_that_nothing_defines_it() -> None:
    native = replace(linear(16, 4096, 2560, "tensor_core:native/chain"), m=16)
    row = replace(TABLE.rows[0], key=numeric_key(native))
    p = explain_offline(native, Ranking({}, [replace(TABLE, rows=(row,))], None))
    assert "no executable definition" in str(p)
