"""The definition of operations along rows: its exp and log, its order of summation, and where rows end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.products import BF16, F16, F32, values

from isogemm.contract import rows

SMALLEST_NORMAL = np.float32(2.0**-126)


def units(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error in units in the last place of float32."""
    unit = np.spacing(np.maximum(np.abs(want), SMALLEST_NORMAL).astype(np.float32)).astype(np.float64)
    return float((np.abs(got.astype(np.float64) - want) / unit).max(initial=0.0))


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def every(first: float, last: float, step: int) -> np.ndarray:
    """Every `step`-th float32 between two of one sign."""
    a, b = sorted(int(np.float32(v).view(np.uint32)) for v in (first, last))
    return np.arange(a, b + 1, step, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize(("first", "last"), [(0.0, 88.7228), (-0.0, -87.3), (-87.3, -103.9)])
def test_exp_is_within_one_unit(first, last):
    x = every(first, last, 3001 if abs(first) < 80 else 11)
    assert x.size > 10000
    want = np.exp(x.astype(np.float64))
    assert units(rows.exp(x), want) < 1.0


def test_exp_at_its_ends():
    below, above = np.nextafter(rows.EXP_LEAST, np.float32(-200)), np.nextafter(rows.EXP_MOST, np.float32(200))
    x = np.float32([0.0, -0.0, -np.inf, np.inf, rows.EXP_LEAST, below, above, 1e30, -1e30, 1e-45])
    assert bits(rows.exp(x)).tolist() == bits([1, 1, 0, np.inf, 0, 0, np.inf, np.inf, 0, 1]).tolist()
    assert np.exp(np.float64(above)) >= 2.0**128 > float(rows.exp(rows.EXP_MOST))
    assert np.isnan(rows.exp(np.float32(np.nan)))


def test_log_is_within_one_unit():
    s = every(1.0, 2.0**40, 10007)
    assert units(rows.log(s), np.log(s.astype(np.float64))) < 1.0
    assert bits(rows.log(np.float32([1.0]))) == 0
    assert np.isnan(rows.log(np.float32([np.nan])))


def chained(row: np.ndarray) -> np.float32:
    """The order of a sum in scalars: lanes by index, met by recursion."""
    lanes = [np.float32(0)] * 128
    for i, x in enumerate(row):
        lanes[i % 128] = np.float32(lanes[i % 128] + x)

    def meet(first: int, step: int) -> np.float32:
        return lanes[first] if step == 128 else np.float32(meet(first, 2 * step) + meet(first + step, 2 * step))

    return meet(0, 1)


@given(n=st.integers(0, 700), seed=st.integers(0, 99))
def test_sums_have_the_documented_order(n, seed):
    row = values((n,), seed=seed)
    assert bits(rows.lane_sum(row)) == bits(chained(row))


def test_the_order_is_not_that_of_one_chain():
    row = values((4096,), seed=3)
    sequential = np.float32(0)
    for x in row:
        sequential = np.float32(sequential + x)
    assert bits(rows.lane_sum(row)) != bits(sequential)


@given(n=st.integers(0, 300), behind=st.integers(1, 300))
def test_zeros_behind_a_row_change_no_sum(n, behind):
    row = values((n,), seed=n, special=n % 2 == 0)
    for zero in (0.0, -0.0):
        longer = np.concatenate([row, np.full(behind, zero, np.float32)])
        assert bits(rows.rounded(rows.sum_row(row), F32)) == bits(rows.rounded(rows.sum_row(longer), F32))


@given(n=st.integers(1, 300), behind=st.integers(1, 300))
def test_hidden_keys_change_nothing_before_them(n, behind):
    row = values((n,), seed=n)
    longer = np.concatenate([row, np.full(behind, -np.inf, np.float32)])
    for function in (rows.softmax, rows.log_softmax):
        np.testing.assert_array_equal(bits(function(row)), bits(function(longer)[:n]))
    assert not rows.softmax(longer)[n:].any()


def test_rows_without_elements_and_with_one():
    none, one = np.zeros(0, np.float32), np.float32([-7.5])
    assert bits(rows.sum_row(none)) == 0
    assert np.isnan(rows.mean(none))[0]
    assert bits(rows.mean(one)) == bits(one)
    assert rows.softmax(one).tolist() == [1.0]
    assert bits(rows.log_softmax(one)) == 0
    for function in (rows.rms_norm, rows.layer_norm, rows.softmax, rows.log_softmax):
        assert function(none).shape == (0,)


def test_the_sign_of_a_zero_maximum_reaches_nothing():
    a, b = np.float32([0.0, -0.0, -3.0]), np.float32([-0.0, 0.0, -3.0])
    for function in (rows.softmax, rows.log_softmax):
        np.testing.assert_array_equal(bits(function(a)), bits(function(b)))


@pytest.mark.parametrize(("dtype", "nan"), [(F32, 0x7FFFFFFF), (BF16, 0x7FFF), (F16, 0x7FFF)], ids=str)
def test_every_nan_is_one(dtype, nan):
    word = np.uint32 if dtype == F32 else np.uint16
    for function in (rows.softmax, rows.log_softmax, rows.rms_norm, rows.sum_row):
        got = rows.rounded(function(np.uint32([0x7F800001, 0xFFC00123, 0x3F800000]).view(np.float32)), dtype)
        assert nan in got.view(word)
        assert np.isnan(got.astype(np.float32)).sum() == (got.view(word) == nan).sum()


@pytest.mark.parametrize("n", [1, 7, 128, 1000, 4096])
def test_errors_against_float64(n):
    x, w, b = (values((n,), seed=s) for s in (n, n + 1, n + 2))
    wide, ww, wb = (v.astype(np.float64) for v in (x, w, b))
    e = np.exp(wide - wide.max())
    centered = wide - wide.mean()
    assert units(rows.rms_norm(x, w), wide / np.sqrt((wide**2).mean() + np.float32(1e-6)) * ww) < 6
    assert units(rows.softmax(x), e / e.sum()) < 8  # x - max, rounded, counts as often as it is large
    norm = centered / np.sqrt((centered**2).mean() + np.float32(1e-5)) * ww + wb
    np.testing.assert_allclose(rows.layer_norm(x, w, b), norm, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(rows.log_softmax(x), wide - wide.max() - np.log(e.sum()), rtol=3e-7, atol=3e-7)
    assert abs(float(rows.sum_row(x)[0]) - wide.sum()) <= 2.0**-24 * (n / 128 + 8) * np.abs(wide).sum()
    assert units(rows.silu_mul(x, w), wide / (1 + np.exp(-wide)) * ww) < 5
