"""Golden products: the shipped bits are the reference's, and they separate arithmetics, orders and K."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from isogemm.contract import compare, golden
from isogemm.contract.spec import ARITHMETICS, Order

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import golden_admission


@pytest.mark.parametrize("names", list(golden.combinations()), ids=" ".join)
def test_the_shipped_bits_are_the_reference_s(names: tuple[str, str, str]) -> None:
    for case in golden.cases(names[0], small=golden.is_small(*names)):
        want = golden.expected(*names, case)
        assert want is not None
        assert compare.differing(want.view(np.float32), golden_admission.bits(*names, case).view(np.float32)) == 0, case


def test_the_data_is_small_and_complete() -> None:
    assert golden.data_path().stat().st_size < 300_000
    held = {(a, d) for a, d, _ in golden.combinations()}
    kept = [a for a in ARITHMETICS.values() if a.name not in ("tensor_core:native", "exact")]
    assert held >= {(a.name, d) for a in kept for d in a.operands}


def test_nothing_is_known_of_what_is_not_shipped() -> None:
    case = golden.GoldenCase(Order(), 512)
    assert golden.expected("tensor_core:native", "bfloat16", "bfloat16", case) is None
    assert golden.expected("fma", "float32", "float32", golden.GoldenCase(Order(), 511)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_tensor_cores_are_told_apart(dtype: str) -> None:
    case = golden.GoldenCase(Order(), 512)
    models = [golden.expected(m, dtype, dtype, case) for m in ("tensor_core:sm90", "tensor_core:sm80", "fma")]
    for i, one in enumerate(models):
        for other in models[:i]:
            assert one is not None
            assert np.mean(one != other) > 0.2


def test_orders_are_told_apart() -> None:
    orders = (Order(), Order("leaf", 512), Order("tree", 8))
    blocks = [
        golden.expected("tensor_core:sm80", "bfloat16", "bfloat16", golden.GoldenCase(order, 2568)) for order in orders
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(blocks[one] != blocks[other]) > 0.2


def test_every_kind_of_number_and_result_occurs() -> None:
    seen = set()
    for names in golden.combinations():
        for case in golden.cases(names[0], small=golden.is_small(*names)):
            words = golden.expected(*names, case)
            assert words is not None
            x = words.view(np.float32)
            tiny = (words & 0x7F800000 == 0) & (words & 0x7FFFFF != 0)
            found = {"nan": np.isnan(x), "inf": np.isinf(x), "-0": words == 1 << 31, "+0": words == 0, "tiny": tiny}
            seen |= {(names[0], kind) for kind, where in found.items() if where.any()}
            assert not np.isnan(x).all()
            assert np.isfinite(x).mean() > 0.4, (names, case)
            assert set(words[np.isnan(x)]) <= {0x7FFFFFFF}
    assert {kind for name, kind in seen if name == "fma"} == {"nan", "inf", "-0", "+0", "tiny"}
    assert {kind for name, kind in seen if name == "tensor_core:sm90"} >= {"nan", "inf", "+0", "tiny"}


def test_rows_and_columns_do_not_depend_on_how_many_there_are() -> None:
    few, many = golden.GoldenCase(Order(), 100), golden.GoldenCase(Order(), 100, False, golden.ROWS, golden.COLUMNS)
    for x, y in zip(
        golden.operands(few, "float32", "float32"), golden.operands(many, "float32", "float32"), strict=True
    ):
        assert np.array_equal(x, y[: x.shape[0], : x.shape[1]])


def test_the_drawing_is_pinned() -> None:
    """Another library version must not draw other operands: the shipped bits would be wrong for them."""
    a, b = golden.operands(golden.GoldenCase(Order(), 7), "bfloat16", "float16")
    assert a[0, :4].tolist() == [48987, 15784, 15638, 15802]
    assert b[:4, 0].tolist() == [12711, 48973, 13315, 11761]
