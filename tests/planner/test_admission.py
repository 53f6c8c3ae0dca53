"""Admission: wrong bits never serve, verdicts carry what could change them, and nothing runs during a capture."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.planner.fakes import H200, FakeFamily, FakeMachine, flip, linear

from isogemm.backends.cuda.gemm.tile import family as triton_tile
from isogemm.planner import admission, trials
from isogemm.planner.admission import Admissions, same_stamp
from isogemm.planner.bench import Bench
from isogemm.planner.products import Chooser
from isogemm.planner.records import Records
from isogemm.planner.tables import Admitted, LibraryRange, Table
from isogemm.planner.trials import try_config, variant_of
from isogemm.problem.numeric import numeric_key
from isogemm.problem.product import Product, Strides

LINEAR = linear(8, 256, 512)


class Chooses(Chooser):
    """A chooser asked by name."""

    def of(self, name: str, config: str, product: Product) -> Any:
        return self.verdict(self.families[name], product, config)


def admissions(
    *families: FakeFamily, machine: FakeMachine | None = None, folder: Path | None = None, tables: Any = ()
) -> Chooses:
    return Chooses(Admissions(machine or FakeMachine(), Records(folder)), {f.name: f for f in families}, tables)


def tried(family: FakeFamily, config: str, product: Product) -> str:
    return try_config(Bench(FakeMachine()), family, product, config)


VARIANTS = {
    "plain": {},
    "float32 out": {"dtype_out": "float32"},
    "float16": {"dtype_a": "float16", "dtype_b": "float16", "dtype_out": "float16"},
    "TN": {"a": Strides(1, 8), "b": Strides(256, 1)},
    "strided": {"a": Strides(2048, 2), "b": Strides(3, 7000), "out": Strides(1, 16)},
    "unaligned": {"align": 2, "a": Strides(513, 1)},
    "an odd N": {"out": Strides(257, 1)},
    "alpha": {"alpha": -0.5},
    "beta C": {"c": Strides(256, 1), "dtype_c": "bfloat16", "beta": 0.25},
    "C and bias": {"c": Strides(1, 8), "dtype_c": "float32", "beta": 1.0, "dtype_bias": "float16", "bias_stride": 2},
    "accumulate": {"c": Strides(256, 1), "dtype_c": "float32", "accumulate": True, "dtype_out": "float32"},
    "all": {"c": Strides(256, 1), "dtype_c": "float32", "accumulate": True, "alpha": 3.0, "dtype_bias": "bfloat16"},
    "batched": {"batch": 4, "a": Strides(512, 1, 4096), "b": Strides(1, 512, 131072), "out": Strides(256, 1, 2048)},
    "batched bias": {
        "batch": 4, "a": Strides(512, 1, 4096), "b": Strides(1, 512), "out": Strides(256, 1, 2048),
        "dtype_bias": "float32",
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, VARIANTS["float16"], VARIANTS["alpha"], VARIANTS["batched"]])
def test_some_trial_is_compiled_as_a_layer_is(changes: dict[str, Any]) -> None:
    """Triton makes other code where sizes and strides are multiples of 16, which those of layers are."""
    layer = replace(LINEAR, **changes)

    def multiples(product: Product) -> set[str]:
        return set(triton_tile.divisible(triton_tile._values(product, 0)))

    assert {"a_row", "b_col", "out_row", "n", "k"} <= multiples(layer)
    posed = [
        trials._pose(layer, case, m, n, 3 if layer.batch > 1 else 1).product
        for case in trials._cases(layer)
        for m, n in trials._sizes(case, layer)
    ]
    assert {variant_of(p) for p in posed} == {variant_of(layer)}
    assert any(multiples(layer) <= multiples(p) for p in posed)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("order", ["chain", "leaf512"])
def test_right_bits_are_admitted_and_one_wrong_bit_is_not(order: str, changes: dict[str, Any]) -> None:
    product = replace(linear(8, 256, 512, f"tensor_core:sm90/{order}"), **changes)
    family = FakeFamily("f", faults={"fast": flip(index=(-1, -1, -1))})
    assert tried(family, "plain", product) == ""
    assert "1 of" in tried(family, "fast", product)
    assert {variant_of(ran) for _, ran in family.runs} == {variant_of(product)}


@pytest.mark.parametrize("contract", ["fma/chain", "tf32:sm90/chain", "tf32x3:sm90/leaf4096", "fma/tree8"])
def test_float32_contracts(contract: str) -> None:
    product = linear(8, 256, 512, contract, dtype_a="float32", dtype_b="float32", dtype_out="float32")
    family = FakeFamily("f")
    assert tried(family, "plain", product) == ""
    family.arithmetic = "fma" if "tf32" in contract else "tf32:sm90"
    assert tried(family, "plain", product) != ""


def test_operands_of_two_types() -> None:
    product = linear(8, 256, 512, "fma/chain", dtype_a="float32", dtype_b="bfloat16", dtype_out="float32")
    assert tried(FakeFamily("f"), "plain", product) == ""


@pytest.mark.parametrize(
    "where",
    [
        lambda p: p.k % 16 != 0,  # a tail of K
        lambda p: p.k % 256 == 0,  # kernels compiled for whole tiles
        lambda p: p.m == 1,
        lambda p: p.m * p.n > 10**6,  # many waves
        lambda p: p.k > 2000,  # many stages
    ],
    ids=["tail", "whole", "one row", "waves", "long"],
)
def test_faults_that_show_only_sometimes_are_found(where: Any) -> None:
    family = FakeFamily("f", faults={"fast": flip(where)})
    assert tried(family, "fast", LINEAR) != ""


def test_writing_beside_the_output_is_found() -> None:
    family = FakeFamily("f")
    bind = family.bind

    def overrun(product: Product, config: str, device: int) -> Any:
        return bind(replace(product, n=product.n + 1), config, device)

    family.bind = overrun
    product = replace(LINEAR, b=Strides(256, 1))  # B has rows to spare, so that one column more can be read
    assert "beside the output were written" in tried(family, "plain", product)


def test_a_kernel_that_no_golden_product_can_judge_is_not_admitted() -> None:
    short = FakeFamily("f", legal=lambda product, config: product.k <= 100)
    assert "long enough" in tried(short, "plain", LINEAR)
    native = linear(8, 256, 512, "tensor_core:native/chain")
    assert "no golden bits" in tried(FakeFamily("f"), "plain", native)


def test_a_refusal_is_recorded_and_said_once_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = FakeFamily("f", faults={"fast": flip()})
    with caplog.at_level(logging.WARNING, "isogemm"):
        first = admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
        runs = len(family.runs)
        again = admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    assert (first.state, again.state) == ("refused", "refused")
    assert again.detail == first.detail != ""
    assert len(family.runs) == runs
    said = [r.message for r in caplog.records if "no tuning table" not in r.message]
    assert len(said) == 1
    assert "f [fast; " in said[0]
    assert first.detail in said[0]


def test_a_verdict_serves_other_sizes_of_the_variant_and_no_other_variant() -> None:
    family = FakeFamily("f")
    mine = admissions(family)
    assert mine.of("f", "fast", LINEAR).state == "admitted"
    runs = len(family.runs)
    assert mine.of("f", "fast", linear(300, 64, 4096)).state == "admitted"
    assert len(family.runs) == runs
    mine.of("f", "fast", replace(LINEAR, dtype_out="float32"))
    assert len(family.runs) > runs


CHANGES = [{"driver": "590.0"}, {"triton": "3.7.0"}, {"device": "NVIDIA H100"}, {"capability": "10.0"}, {"cuda": "14"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_records_are_void_when_the_stamp_changes(tmp_path: Path, change: dict[str, str]) -> None:
    family = FakeFamily("f")
    admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    runs = len(family.runs)
    admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    assert len(family.runs) == runs
    admissions(family, folder=tmp_path, machine=FakeMachine({**H200, **change})).of("f", "fast", LINEAR)
    assert len(family.runs) > runs


def test_records_are_void_when_the_source_changes_and_not_when_torch_does(tmp_path: Path) -> None:
    family = FakeFamily("f")
    admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    runs = len(family.runs)
    admissions(family, folder=tmp_path, machine=FakeMachine({**H200, "torch": "9"})).of("f", "fast", LINEAR)
    assert len(family.runs) == runs
    family.source = "v2"
    admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    assert len(family.runs) > runs


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": "isogemm.admission.v1"}'])
def test_a_damaged_record_costs_a_trial(tmp_path: Path, damage: str) -> None:
    family = FakeFamily("f")
    admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    (record,) = tmp_path.iterdir()
    good = record.read_text()
    record.write_text(damage)
    runs = len(family.runs)
    assert admissions(family, folder=tmp_path).of("f", "fast", LINEAR).state == "admitted"
    assert len(family.runs) > runs
    assert json.loads(record.read_text()) == json.loads(good)


def test_a_record_moved_to_another_key_is_not_believed(tmp_path: Path) -> None:
    family = FakeFamily("f", faults={"fast": flip()})
    admissions(family, folder=tmp_path).of("f", "plain", LINEAR)
    (right,) = tmp_path.iterdir()
    admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    (wrong,) = set(tmp_path.iterdir()) - {right}
    wrong.write_text(right.read_text())
    assert admissions(family, folder=tmp_path).of("f", "fast", LINEAR).state == "refused"


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "isogemm"):
        assert admissions(FakeFamily("f"), folder=tmp_path / "file").of("f", "fast", LINEAR).state == "admitted"
    assert "not kept" in caplog.text


def test_nothing_runs_during_a_capture(tmp_path: Path) -> None:
    family, machine = FakeFamily("f"), FakeMachine(captures=True)
    mine = admissions(family, machine=machine, folder=tmp_path)
    assert mine.of("f", "fast", LINEAR).state == "unknown"
    assert mine.arithmetic() == ""
    assert not family.runs
    machine.captures = False
    assert mine.of("f", "fast", LINEAR).state == "admitted"
    machine.captures = True
    assert mine.of("f", "fast", LINEAR).state == "admitted"
    assert admissions(family, machine=machine, folder=tmp_path).of("f", "fast", LINEAR).state == "admitted"


def test_a_kernel_that_raises_is_left_out_but_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(product: Product, value: np.ndarray) -> None:
        raise RuntimeError("out of resources")

    family = FakeFamily("f", faults={"fast": broken})
    with caplog.at_level(logging.WARNING, "isogemm"):
        verdict = admissions(family, folder=tmp_path).of("f", "fast", LINEAR)
    assert verdict.state == "refused"
    assert "out of resources" in verdict.detail
    assert "cannot run: RuntimeError" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_trial_that_a_capture_interrupts_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = FakeMachine()

    def interrupted(product: Product, value: np.ndarray) -> None:
        machine.captures = True
        raise RuntimeError("nothing is copied while a stream is captured")

    family = FakeFamily("f", faults={"fast": interrupted})
    mine = admissions(family, machine=machine, folder=tmp_path)
    with caplog.at_level(logging.WARNING, "isogemm"):
        assert mine.of("f", "fast", LINEAR).state == "unknown"
    assert "cannot run" not in caplog.text
    machine.captures = False
    family.faults = {}
    assert mine.of("f", "fast", LINEAR).state == "admitted"


def shipped(**changes: Any) -> Table:
    stamp = {**H200, "golden": admission.golden_digest()}
    entry = Admitted("f", "f-v1", variant_of(LINEAR), ("fast",), "2026-11-21")
    return replace(Table("h200.json", stamp, "2026-11-21", "tensor_core:sm90", admitted=(entry,)), **changes)


def test_a_shipped_record_that_matches_is_trusted_as_it_is() -> None:
    family = FakeFamily("f")
    mine = admissions(family, tables=[shipped()], machine=FakeMachine(captures=True))
    verdict = mine.of("f", "fast", LINEAR)
    assert (verdict.state, verdict.source, verdict.date) == ("admitted", "table h200.json", "2026-11-21")
    assert mine.arithmetic() == "tensor_core:sm90"
    assert not family.runs


@pytest.mark.parametrize("change", [*CHANGES, {"golden": "other"}], ids=str)
def test_a_shipped_record_that_does_not_match_is_tried_anew(change: dict[str, str]) -> None:
    family = FakeFamily("f")
    table = shipped(stamp={**H200, "golden": admission.golden_digest(), **change})
    verdict = admissions(family, tables=[table]).of("f", "fast", LINEAR)
    assert verdict.source == "a trial in this process"
    assert family.runs


def test_a_shipped_record_of_another_source_is_tried_anew() -> None:
    family = FakeFamily("f", source="v2", faults={"fast": flip()})
    assert admissions(family, tables=[shipped()]).of("f", "fast", LINEAR).state == "refused"


def ranged(product: Product, low: int = 5, high: int = 64, **stamp: str) -> Table:
    entry = LibraryRange("library", "library-v1", numeric_key(product), variant_of(product), "algo", low, high, "today")
    return Table("user.json", {**H200, **stamp}, "today", library=(entry,))


def test_a_library_serves_exactly_what_was_tuned() -> None:
    library = FakeFamily("library", offered=("algo",))
    mine = admissions(library, tables=[ranged(LINEAR)])
    states = {m: mine.of("library", "algo", LINEAR.with_m(m)).state for m in (4, 5, 64, 65)}
    assert states == {4: "absent", 5: "admitted", 64: "admitted", 65: "absent"}
    others = [
        linear(8, 256, 528),
        replace(LINEAR, align=16),
        replace(LINEAR, a=Strides(520, 1)),
        replace(LINEAR, alpha=2.0),
    ]
    assert [mine.of("library", "algo", p).state for p in others] == ["absent"] * 4
    assert not library.runs


@pytest.mark.parametrize("change", [{"cublaslt": "140000"}, {"driver": "590"}], ids=str)
def test_a_library_with_other_software_is_stale(change: dict[str, str]) -> None:
    library = FakeFamily("library", offered=("algo",))
    assert admissions(library, tables=[ranged(LINEAR, **change)]).of("library", "algo", LINEAR).state == "stale"
    library.source = "v2"
    assert admissions(library, tables=[ranged(LINEAR)]).of("library", "algo", LINEAR).state == "stale"


def test_triton_is_no_part_of_a_library() -> None:
    other = {**H200, "triton": "9"}
    assert same_stamp(H200, other, library=True)
    assert not same_stamp(H200, other, library=False)


@pytest.mark.parametrize(
    ("computes", "found"),
    [("tensor_core:sm90", "tensor_core:sm90"), ("tensor_core:sm80", "tensor_core:sm80"), ("fma", "tensor_core:native")],
)
def test_the_arithmetic_is_found_by_its_bits(
    computes: str, found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = FakeFamily("f", arithmetic=computes)
    with caplog.at_level(logging.WARNING, "isogemm"):
        assert admissions(family, folder=tmp_path).arithmetic() == found
    assert ("no executable definition" in caplog.text) == (found == "tensor_core:native")
    runs = len(family.runs)
    assert admissions(family, folder=tmp_path).arithmetic() == found
    assert len(family.runs) == runs, "the answer was not kept"


def test_one_broken_kernel_does_not_make_a_device_a_stranger() -> None:
    def broken(product: Product, value: np.ndarray) -> None:
        raise RuntimeError("out of resources")

    family = FakeFamily("f", offered=("bad", "raises", "plain"), faults={"bad": flip(), "raises": broken})
    assert admissions(family).arithmetic() == "tensor_core:sm90"


def test_where_no_model_fits_kernels_are_compared_with_a_plain_one() -> None:
    plain = FakeFamily("plain", arithmetic="fma")
    other = FakeFamily("other", arithmetic="fma", faults={"plain": flip(lambda p: p.k > 2000)})
    mine = admissions(plain, other)
    native = linear(8, 256, 512, "tensor_core:native/chain")
    assert mine.of("other", "fast", native).state == "admitted"
    assert mine.of("other", "plain", native).state == "refused"
