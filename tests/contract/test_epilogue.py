"""The epilogue against float64 steps: a float64 product or sum of two float32 numbers, rounded once more, is exact."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.draws import CLASSES, FLOAT32, draw

from isogemm.contract.compare import bits, first_mismatch
from isogemm.contract.reference import canonical, epilogue
from isogemm.errors import DTypeError, OptionError, ShapeError

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), BF16, np.dtype(np.float16))


def step(x: Any) -> Any:
    return x.astype(np.float32).astype(np.float64)


def round_once(x: Any, dtype: Any) -> Any:
    """Bits of float32 numbers (held in float64) in `dtype`, to nearest even, NaN canonical."""
    if dtype == BF16:
        pattern = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        pattern = ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        pattern = bits(x.astype(dtype))
    return np.where(np.isnan(x), 0x7FFF if pattern.itemsize == 2 else 0x7FFFFFFF, pattern).astype(pattern.dtype)


def by_steps(acc: Any, alpha: float, beta: float, c: Any, bias: Any, dtype: Any) -> Any:
    with np.errstate(all="ignore"):
        v, scale, share = acc.astype(np.float64), np.float64(np.float32(alpha)), np.float64(np.float32(beta))
        v = v if scale == 1 else step(scale * v)
        if share != 0:
            v = step(v + step(share * c.astype(np.float64)))
        if bias is not None:
            v = step(v + bias.astype(np.float64))
        return round_once(v, dtype)


@settings(max_examples=200)
@given(
    st.sampled_from(CLASSES),
    st.sampled_from([1.0, 0.0, 0.1, -2.5, 3e38, 1e-40, float("inf")]),
    st.sampled_from([0.0, 1.0, -1.0, 0.3, 1e-60, 1e60]),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.integers(0, 2**32 - 1),
)
def test_steps(kind: str, alpha: float, beta: float, out: Any, bias_dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    acc, c = (draw(rng, (4, 6), kind, FLOAT32).view(np.float32) for _ in range(2))
    with np.errstate(all="ignore"):
        bias = None if bias_dtype is None else rng.standard_normal(6).astype(bias_dtype)
        c = c.astype(out)
        got = epilogue(acc, alpha=alpha, beta=beta, c=c, bias=bias, out_dtype=out)
    assert got.dtype == out
    expected = by_steps(acc, alpha, beta, c, bias, out)
    assert first_mismatch(got, expected.view(out)) is None


def test_every_step_is_rounded() -> None:
    acc = np.full((1, 1), 1 + 2.0**-23, np.float32)
    got = epilogue(acc, alpha=1 + 2.0**-23, beta=1.0, c=np.full((1, 1), -(1 + 2.0**-22), np.float32))
    assert got[0, 0] == 0  # a fused multiply-add would leave 2**-46


@pytest.mark.parametrize("beta", [0.0, -0.0, 1e-60])
def test_beta_zero_never_reads_c(beta: float) -> None:
    acc = np.ones((2, 3), np.float32)
    poison = np.full((2, 3), np.nan, np.float32)
    assert (epilogue(acc, beta=beta, c=poison) == 1).all()
    assert (epilogue(acc, beta=beta) == 1).all()


def test_alpha_zero_multiplies() -> None:
    acc = np.array([[np.nan, np.inf, -2.0, 3.0]], np.float32)
    assert bits(epilogue(acc, alpha=0.0)).tolist() == [[0x7FFFFFFF, 0x7FFFFFFF, 0x80000000, 0]]


@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_nan_is_canonical_and_the_accumulators_stay(out: Any) -> None:
    patterns = np.array([[0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF]], np.uint32)
    got = bits(epilogue(patterns.view(np.float32), out_dtype=out))
    assert (got == (0x7FFFFFFF if got.itemsize == 4 else 0x7FFF)).all()
    assert patterns.tolist() == [[0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF]]


def test_signalling_nans_pass_without_a_warning() -> None:
    x = np.array([0x7F81, 0xFF81, 0x7F80, 0x8000], np.uint16).view(BF16)
    assert bits(canonical(x)).tolist() == [0x7FFF, 0x7FFF, 0x7F80, 0x8000]
    with pytest.raises(DTypeError, match="float64"):
        canonical(np.ones(2))


def test_a_fresh_array_even_when_nothing_is_to_be_done() -> None:
    acc = np.ones((2, 3), np.float32)
    assert not np.shares_memory(epilogue(acc), acc)


def test_errors() -> None:
    acc = np.ones((2, 3), np.float32)
    for dtype in (np.float64, np.int8, np.complex64):
        with pytest.raises(DTypeError, match="bfloat16"):
            epilogue(acc, out_dtype=dtype)
    with pytest.raises(DTypeError, match="bias"):
        epilogue(acc, bias=np.ones(3))
    with pytest.raises(DTypeError, match="accumulators"):
        epilogue(np.ones((2, 3)))
    with pytest.raises(OptionError, match="beta"):
        epilogue(acc, beta=1.0)
    with pytest.raises(ShapeError, match="C"):
        epilogue(acc, beta=1.0, c=np.ones((3, 2), np.float32))
    with pytest.raises(ShapeError, match="bias"):
        epilogue(acc, bias=np.ones(2, np.float32))
