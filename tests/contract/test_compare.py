"""Comparison: bits, first mismatch, steps between numbers, and error in units of its bound."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isogemm.contract.compare import bits, differing, error_units, first_mismatch, ulp_distance
from isogemm.errors import DeviceError, DTypeError, LayoutError, ShapeError

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
FAR = np.iinfo(np.int64).max


def one(pattern: int, dtype: Any) -> Any:
    return np.array([pattern], f"u{np.dtype(dtype).itemsize}").view(dtype)


def test_bits_keep_shape_and_width() -> None:
    for dtype in DTYPES:
        x = np.zeros((2, 0, 3), dtype)
        assert bits(x).shape == (2, 0, 3)
        assert bits(x).itemsize == x.itemsize
    assert bits(np.float32([1.0, -0.0])).tolist() == [0x3F800000, 0x80000000]
    assert bits(np.ones((4, 6), ml_dtypes.bfloat16)[::2, ::-3]).tolist() == [[0x3F80] * 2] * 2
    with pytest.raises(DTypeError, match="int32"):
        bits(np.zeros(3, np.int32))


def test_bits_tell_zeros_and_nans_apart() -> None:
    x = np.array([0x0, 0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
    y = np.array([0x80000000, 0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
    assert differing(x, y) == 1
    assert differing(x, x) == 0
    assert differing(x, np.array([0x0, 0x7FFFFFFF, 0x3F800001], np.uint32).view(np.float32)) == 2


def test_first_mismatch_in_row_major_order() -> None:
    x = np.ones((3, 4), np.float32)
    y = x.copy()
    assert first_mismatch(x, y) is None
    y[2, 0], y[1, 3] = 5, np.float32(1) - np.float32(2.0**-24)
    found = first_mismatch(x, y)
    assert found is not None
    assert (found.index, found.left_bits, found.right_bits, found.ulps) == ((1, 3), "0x3f800000", "0x3f7fffff", 1)
    assert (found.left, found.right) == (1.0, float(y[1, 3]))
    assert str(found) == "[1, 3]: 0x3f800000 (1) against 0x3f7fffff (0.99999994), 1 ULP"
    halves = first_mismatch(np.float16([0.0]), np.float16([-0.0]))
    assert halves is not None
    assert (halves.right_bits, halves.ulps) == ("0x8000", 0)
    scalar = first_mismatch(np.array(1.0), np.array(2.0))
    assert scalar is not None
    assert scalar.index == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulps_across_zero_infinity_and_nan(dtype: Any) -> None:
    width = 8 * np.dtype(dtype).itemsize
    infinity = int(bits(np.array([np.inf], dtype))[0])
    sign = 1 << (width - 1)
    pairs = {
        (0, sign): 0,
        (1, sign | 1): 2,
        (0, sign | 5): 5,
        (infinity, infinity - 1): 1,
        (infinity + 1, infinity + 1): 0,
        (infinity + 1, sign | infinity | 1): 0,
        (infinity + 1, infinity): FAR,
        (0, infinity + 1): FAR,
        (infinity, infinity | sign): min(2 * infinity, FAR),
    }
    for (left, right), expected in pairs.items():
        for x, y in ((left, right), (right, left)):
            assert int(ulp_distance(one(x, dtype), one(y, dtype))[0]) == expected, (hex(x), hex(y))


@example(left=0, right=0x7F81, dtype=ml_dtypes.bfloat16)
@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), st.sampled_from([np.float16, ml_dtypes.bfloat16]))
def test_ulps_count_the_numbers_between(left: int, right: int, dtype: Any) -> None:
    x, y = one(left, dtype), one(right, dtype)
    got = int(ulp_distance(x, y)[0])
    with np.errstate(all="ignore"):  # a signalling NaN of bfloat16 warns
        missing = [bool(np.isnan(v[0])) for v in (x, y)]
    if any(missing):
        assert got == (0 if all(missing) else FAR)
        return
    with np.errstate(all="ignore"):
        numbers = np.unique(np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64))
    numbers = numbers[~np.isnan(numbers)]
    places = np.searchsorted(numbers, [float(x[0]), float(y[0])])
    assert got == abs(int(places[0]) - int(places[1]))


def test_ulps_of_neighbours_in_float64() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(100) * 10.0 ** rng.integers(-300, 300, 100)
    assert (ulp_distance(x, np.nextafter(x, np.inf)) == 1).all()
    assert ulp_distance(x, x).dtype == np.int64


def test_pairs_must_match() -> None:
    x = np.zeros(3, np.float32)
    for compare in (differing, first_mismatch, ulp_distance):
        with pytest.raises(ShapeError):
            compare(x, x[:2])
        with pytest.raises(DTypeError):
            compare(x, x.astype(np.float64))


def test_tensors_are_compared_as_arrays_are() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = torch.arange(6.0, dtype=dtype).view(2, 3).requires_grad_()
        y = x.detach().clone().T.contiguous().T  # other strides
        assert first_mismatch(x, y) is None
        y[1, 1] = -4.0
        assert differing(x, y) == 1
        found = first_mismatch(x, y._neg_view()._neg_view())
        assert found is not None
        assert (found.index, found.left, found.right) == ((1, 1), 4.0, -4.0)
        assert ulp_distance(x, y).max() == found.ulps
        assert bits(x).shape == (2, 3)
    x = torch.ones(2, 2)
    assert error_units(x @ x, x, x).max() == 0
    assert first_mismatch(x, x.numpy()) is None
    with pytest.raises(DeviceError, match="meta"):
        differing(x, x.to("meta"))
    with pytest.raises(LayoutError, match="sparse"):
        differing(x, x.to_sparse())


def test_what_is_no_array_is_refused() -> None:
    for x in ([1.0], None, 1.0):
        with pytest.raises(DTypeError, match="an array"):
            first_mismatch(np.ones(1, np.float32), x)


def test_error_units() -> None:
    a, b = np.array([[3.0, 4.0, 0.0, 0.0]], np.float32), np.array([[1.0], [-1.0], [9.0], [9.0]], np.float32)
    bound = 2.0**-23 * 2 * 7
    assert error_units(np.float32([[-1.0]]), a, b)[0, 0] == 0
    assert error_units(np.float32([[-1.0 + bound]]), a, b)[0, 0] == pytest.approx(1, rel=0.2)
    assert error_units(np.array([[-1.0]], ml_dtypes.bfloat16) * 2, a, b)[0, 0] == pytest.approx(1 / (2.0**-7 * 14))


def test_error_units_where_there_is_no_bound() -> None:
    zero = np.zeros((1, 2), np.float32)
    assert error_units(np.float32([[0.0]]), zero, zero.T)[0, 0] == 0
    assert error_units(np.float32([[1e-30]]), zero, zero.T)[0, 0] == np.inf
    infinite = np.float32([[np.inf, 1.0]])
    finite = np.ones((2, 1), np.float32)
    got = [error_units(np.float32([[v]]), infinite, finite)[0, 0] for v in (np.inf, -np.inf, 1.0, np.nan)]
    assert got == [0, np.inf, np.inf, np.inf]
    undefined = error_units(np.float32([[np.nan]]), infinite, np.float32([[0.0], [1.0]]))
    assert undefined[0, 0] == 0
    assert error_units(np.zeros((2, 0), np.float32), np.zeros((2, 3)), np.zeros((3, 0))).shape == (2, 0)
    assert (error_units(np.zeros((2, 2), np.float32), np.zeros((2, 0)), np.zeros((0, 2))) == 0).all()


def test_error_units_of_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"\[m, n\]"):
        error_units(np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((4, 2)))
