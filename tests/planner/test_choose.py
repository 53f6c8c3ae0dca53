"""Choosing: tables order kernels, admission decides; captures, stale records and refusals are said, never hidden."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.fakes import H200, FakeFamily, FakeMachine, flip, linear

from isogemm.backends.cuda.gemm import choose as module
from isogemm.contract.spec import Contract
from isogemm.errors import ContractError, DeviceError, LayoutError
from isogemm.planner import admission
from isogemm.planner.admission import Admissions
from isogemm.planner.fingerprint import fingerprint
from isogemm.planner.products import Chooser
from isogemm.planner.records import Records
from isogemm.planner.tables import Bucket, LibraryRange, Table, TunedRow, Use
from isogemm.planner.trials import variant_of
from isogemm.problem.numeric import numeric_key

LINEAR = linear(8, 256, 512)


def table(*uses: Use, product: Any = LINEAR, m: int = 4096, **changes: Any) -> Table:
    row = TunedRow(numeric_key(product), (Bucket(m, uses),), {1: 5.0, m: 50.0})
    stamp = {**H200, "golden": admission.golden_digest()}
    return replace(Table("t.json", stamp, "2026-11-21", "tensor_core:sm90", rows=(row,)), **changes)


def chooser(
    *found: FakeFamily, tables: Any = (), machine: FakeMachine | None = None, folder: Path | None = None
) -> Chooser:
    here = Admissions(machine or FakeMachine(), Records(folder))
    return Chooser(here, {f.name: f for f in found}, tables)


def test_the_table_s_kernel_is_chosen_and_its_time_expected() -> None:
    f, g = FakeFamily("f"), FakeFamily("g")
    choice = chooser(f, g, tables=[table(Use("g", "plain"), Use("f", "fast"))]).choose(LINEAR.with_m(4096))
    assert (choice.family, choice.config, choice.expected_us) == ("g", "plain", 50.0)
    assert choice.reason == "table t.json"
    assert g.builds[-1] == ("plain", LINEAR.with_m(4096))


def test_the_user_s_table_goes_before_a_shipped_one() -> None:
    tables = [table(Use("f", "fast"), name="user.json"), table(Use("f", "plain"), name="h200.json")]
    assert chooser(FakeFamily("f"), tables=tables).choose(LINEAR).reason == "table user.json"


def test_m_picks_the_bucket() -> None:
    rows = TunedRow(
        numeric_key(LINEAR), (Bucket(16, (Use("f", "a"),)), Bucket(64, (Use("f", "b"),))), {16: 1.0, 64: 2.0}
    )
    here = chooser(FakeFamily("f", offered=("a", "b")), tables=[replace(table(), rows=(rows,))])
    assert [here.choose(LINEAR.with_m(m)).config for m in (1, 16, 17, 64, 1000)] == ["a", "a", "b", "b", "b"]


def test_a_near_product_lends_its_kernels_but_not_its_time() -> None:
    choice = chooser(FakeFamily("f"), tables=[table(Use("f", "plain"))]).choose(linear(8, 300, 500))
    assert (choice.config, choice.expected_us) == ("plain", None)
    assert choice.reason == "default: as for n 256, k 512 in t.json"


def test_a_model_goes_before_tables_of_products_nearby_and_takes_the_least_time() -> None:
    f = FakeFamily("f", expects=lambda p, config: {"fast": 7.0, "plain": 3.0}[config])
    g = FakeFamily("g", expects=lambda p, config: {"fast": 4.0, "plain": 5.0}[config])
    choice = chooser(f, g, tables=[table(Use("f", "fast"))]).choose(linear(8, 300, 500))
    assert (choice.family, choice.config, choice.expected_us) == ("f", "plain", 3.0)
    assert choice.reason == "a model of its time"


@pytest.mark.parametrize(("m", "expected"), [(4096, "fast"), (4000, "fast"), (3000, "plain"), (5000, "plain")])
def test_a_table_serves_the_rows_that_were_timed_and_those_that_take_as_long(m: int, expected: str) -> None:
    """Tiles of 1024 rows: 4000 of them take the waves of 4096, 3000 fewer, and 5000 are more than were timed."""
    f = FakeFamily("f", expects=lambda p, config: -(-p.m // 1024) + (config == "fast"))
    assert chooser(f, tables=[table(Use("f", "fast"))]).choose(LINEAR.with_m(m)).config == expected


def test_what_a_model_puts_first_is_admitted_like_any_other() -> None:
    f = FakeFamily("f", faults={"fast": flip()}, expects=lambda p, config: {"fast": 1.0, "plain": 9.0}[config])
    assert chooser(f).choose(LINEAR).config == "plain"
    assert any(config == "fast" for config, _ in f.runs)


def test_without_tables_the_plain_kernel_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "isogemm"):
        choice = chooser(FakeFamily("f")).choose(LINEAR)
        chooser(FakeFamily("f")).choose(LINEAR)
    assert choice.reason.startswith("safe")
    assert [r.message for r in caplog.records if "isogemm tune" in r.message] == [caplog.records[0].message]


def test_wrong_bits_are_never_chosen_however_fast(caplog: pytest.LogCaptureFixture) -> None:
    f = FakeFamily("f", faults={"fast": flip(lambda p: p.k > 2000)})
    with caplog.at_level(logging.WARNING, "isogemm"):
        choice = chooser(f, tables=[table(Use("f", "fast"), Use("f", "plain"))]).choose(LINEAR)
    assert choice.config == "plain"
    assert "f [fast; tensor_core:sm90" in caplog.text


@pytest.mark.parametrize("order", ["tree4", "leaf512"])
def test_an_order_of_leaves_has_to_be_right_in_the_sums_too(order: str) -> None:
    """One in thousands of 16-bit results shows how leaves met: trials of these alone let a wrong order pass."""
    f = FakeFamily("f", faults={"fast": flip(lambda p: p.dtype_out == "float32")})
    product = replace(LINEAR, contract=Contract.parse(f"tensor_core:sm90/{order}"))
    assert product.dtype_out == "bfloat16"
    assert chooser(f).choose(product).config == "plain"
    assert chooser(f).choose(LINEAR).config == "fast"


def test_nothing_right_is_an_error_that_names_what_was_refused() -> None:
    f = FakeFamily("f", faults={"fast": flip(), "plain": flip()})
    with pytest.raises(ContractError, match=r"f \[fast\]: refused") as error:
        chooser(f, tables=[table(Use("f", "fast"))]).choose(LINEAR)
    assert "f [plain]: refused" in str(error.value)


def test_a_table_may_name_what_is_not_here_or_not_legal() -> None:
    f = FakeFamily("f", legal=lambda p, config: config != "fast" or p.m <= 4)
    uses = Use("absent", "x"), Use("f", "unknown"), Use("f", "fast"), Use("f", "plain")
    assert chooser(f, tables=[table(*uses)]).choose(LINEAR).config == "plain"


def test_a_kernel_that_cannot_be_built_is_passed_over_and_said(caplog: pytest.LogCaptureFixture) -> None:
    f = FakeFamily("f")
    here = chooser(f, tables=[table(Use("f", "fast"), Use("f", "plain"))])
    here.choose(LINEAR)
    bind = f.bind

    def bind_but_fast(product, config, device):
        if config == "fast":
            raise RuntimeError("shared memory")
        return bind(product, config, device)

    f.bind = bind_but_fast
    with caplog.at_level(logging.WARNING, "isogemm"):
        assert here.choose(LINEAR).config == "plain"
    assert "shared memory" in caplog.text


def test_kernels_that_a_product_does_not_fit_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A library's algorithms are admitted for a table's N; with an odd one they cannot be built, all for one reason."""
    odd, uses = linear(8, 257, 512), [Use("f", f"algorithm {i}") for i in range(9)]
    f = FakeFamily("f", offered=[use.config for use in uses] + ["plain"])
    bind = f.bind

    def refusing(product: Any, config: str, device: int) -> Any:
        if config != "plain" and product.m != 16:
            raise LayoutError("strides", limit="a multiple of 8", value=257, nearest=264)
        return bind(product, config, device)

    here = chooser(f, tables=[table(*uses, Use("f", "plain"))])
    for use in uses:
        here.verdict(f, odd, use.config)
    f.bind = refusing
    with caplog.at_level(logging.WARNING, "isogemm"):
        assert [here.choose(odd.with_m(m)).config for m in (1, 8, 64)] == ["plain"] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "9 admitted kernels" in line
    assert "a multiple of 8" in line
    assert "f [plain] serves" in line


def test_under_capture_only_what_was_admitted_before_serves() -> None:
    f, machine = FakeFamily("f"), FakeMachine()
    here = chooser(f, tables=[table(Use("f", "fast"), Use("f", "plain"))], machine=machine)
    machine.captures = True
    with pytest.raises(DeviceError, match="call once with these shapes before capturing"):
        here.choose(LINEAR)
    assert not f.runs
    machine.captures = False
    here.verdict(f, LINEAR, "plain")
    machine.captures = True
    assert here.choose(LINEAR).config == "plain"


def ranged(**stamp: str) -> Table:
    entry = LibraryRange("library", "library-v1", numeric_key(LINEAR), variant_of(LINEAR), "algo", 1, 16, "today")
    return table(Use("library", "algo"), Use("f", "plain"), stamp={**H200, **stamp}, library=(entry,))


def test_a_library_serves_while_its_records_hold_and_is_left_out_after(caplog: pytest.LogCaptureFixture) -> None:
    library, f = FakeFamily("library", offered=("algo",)), FakeFamily("f")
    assert chooser(f, library, tables=[ranged()]).choose(LINEAR).family == "library"
    assert not library.runs
    with caplog.at_level(logging.WARNING, "isogemm"):
        for m in (1, 2, 8):
            assert chooser(f, library, tables=[ranged(cublaslt="1")]).choose(LINEAR.with_m(m)).family == "f"
    assert [r.message for r in caplog.records if "cublaslt 1, now 130000" in r.message and "isogemm tune" in r.message]
    assert len(caplog.records) == 1


def test_a_library_outside_its_range_is_passed_over_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    library, f = FakeFamily("library", offered=("algo",)), FakeFamily("f")
    with caplog.at_level(logging.WARNING, "isogemm"):
        assert chooser(f, library, tables=[ranged()]).choose(LINEAR.with_m(17)).family == "f"
    assert not caplog.records


def test_contracts_of_other_tensor_cores_are_refused_with_the_own_one() -> None:
    here = chooser(FakeFamily("f", arithmetic="tensor_core:sm90"), tables=[table(arithmetic="")])
    with pytest.raises(ContractError, match="tensor_core:sm90/leaf512"):
        here.choose(linear(8, 256, 512, "tensor_core:sm80/leaf512"))


def test_where_no_model_fits_products_are_native() -> None:
    f = FakeFamily("f", arithmetic="fma")
    here = chooser(f, machine=FakeMachine({**H200, "device": "New", "capability": "12.0"}))
    assert here.arithmetic() == "tensor_core:native"
    assert here.choose(linear(8, 256, 512, "tensor_core:native/chain")).family == "f"
    with pytest.raises(ContractError, match="tensor_core:native/chain"):
        here.choose(LINEAR)


def test_tables_of_another_capability_give_no_hints() -> None:
    other = table(Use("f", "plain"), stamp={**H200, "device": "NVIDIA A100", "capability": "8.0"}, arithmetic="")
    assert chooser(FakeFamily("f"), tables=[other]).choose(LINEAR).config == "fast"
    near = table(Use("f", "plain"), stamp={**H200, "device": "NVIDIA H100"}, arithmetic="")
    assert chooser(FakeFamily("f"), tables=[near]).choose(LINEAR).config == "plain"


def test_a_choice_launches_the_right_bits() -> None:
    import numpy as np
    from tests.planner.fakes import compute

    from isogemm.problem.product import Addresses

    x = np.random.default_rng(1).integers(0, 1 << 14, 256 * 512, np.uint16)
    out = np.full(8 * 256, 0x7FC1, np.uint16)
    at = Addresses(x.ctypes.data, x.ctypes.data, out.ctypes.data)
    chooser(FakeFamily("f")).choose(LINEAR).launch(at, 0)
    assert (out.reshape(1, 8, 256) == compute(LINEAR, at).view(np.uint16)).all()


def test_families_load_or_say_why() -> None:
    rows = module.FAMILIES
    assert set(rows.found) | set(rows.absent) == set(rows.rows)
    for name, family in rows.found.items():
        assert family.name == name
        assert family.library == (name == "cublaslt")
        assert len(fingerprint(family.home)) >= 8


def _admit(folder: str, results: Any) -> None:
    family = FakeFamily("f", faults={"fast": flip()})
    admission.fingerprint = lambda home: home
    here = chooser(family, folder=Path(folder))
    results.put((here.choose(LINEAR).config, len(family.runs)))


def test_two_processes_agree_and_a_third_learns_from_them(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    pair = [context.Process(target=_admit, args=(str(tmp_path), results)) for _ in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
        assert process.exitcode == 0
    found = [results.get(timeout=9) for _ in pair]
    assert [config for config, _ in found] == ["plain", "plain"]
    third = FakeFamily("f", faults={"fast": flip()})
    assert chooser(third, folder=tmp_path).choose(LINEAR).config == "plain"
    assert not third.runs


def test_public_functions_go_through_the_device_s_chooser(monkeypatch: pytest.MonkeyPatch) -> None:
    here = chooser(FakeFamily("f", arithmetic="tensor_core:sm80"))
    monkeypatch.setattr(module, "_choosers", {3: here})
    assert module.arithmetic_of(3) == "tensor_core:sm80"
    assert str(module.default_contract_of(3, "bfloat16")) == "tensor_core:sm80/chain"
    assert str(module.default_contract_of(3, "float32")) == "fma/chain"
    assert module.choose(linear(8, 256, 512, "tensor_core:sm80/chain"), 3).family == "f"
