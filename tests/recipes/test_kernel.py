"""A new kernel is its file and one row, in every column: here a toy is added to each, and serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.planner.fakes import FakeMachine, compute, linear

from isogemm.backends.cuda.gemm import choose
from isogemm.planner.admission import Admissions
from isogemm.planner.family import Families
from isogemm.planner.records import Records
from isogemm.problem.product import Addresses

PRODUCT = replace(linear(3, 5, 7, "fma/chain"), dtype_a="float32", dtype_b="float32", dtype_out="float32")


def test_a_row_under_another_name_than_its_family_s_says_so() -> None:
    families: Families = Families("tests.recipes", {"other": "toy_product:Toy"})
    assert not families.found
    assert "its name is 'toy', its row's 'other'" in families.absent["other"]


def test_a_kernel_for_products_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    admissions = Admissions(FakeMachine(), Records(tmp_path))
    monkeypatch.setattr(choose, "FAMILIES", Families("tests.recipes", {"toy": "toy_product:Toy"}))  # the row
    monkeypatch.setattr(choose, "_choosers", {})
    monkeypatch.setattr(choose, "admissions", lambda device: admissions)
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(n * PRODUCT.k).astype(np.float32) for n in (PRODUCT.m, PRODUCT.n))
    out = np.full((1, PRODUCT.m, PRODUCT.n), np.nan, np.float32)
    at = Addresses(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    choice = choose.choose(PRODUCT, 0)
    choice.launch(at, 0)
    assert (choice.family, choice.config) == ("toy", "right")
    assert (out.view(np.uint32) == compute(PRODUCT, at).view(np.uint32)).all()
    states = {
        known.code.partition(";")[0]: known.admission.state for known in admissions.known() if known.name == "toy"
    }
    assert states == {"wrong": "refused", "right": "admitted"}
