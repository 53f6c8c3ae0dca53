"""The definition of attention: its exp2, its steps by a second implementation, and a golden hash."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tests.contract.oracle import to_float32
from tests.products import BF16, DTYPES, F16, F32, assert_same, values

from isogemm.contract import attention as define
from isogemm.contract.reference import canonical

f32 = np.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def drawn(b: int, hq: int, hkv: int, tq: int, tk: int, d: int, dtype: np.dtype[Any] = F32, dv: int = 0) -> Any:
    shapes = ((b, hq, tq, d), (b, hkv, tk, d), (b, hkv, tk, dv or d))
    return [values(shape, dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exp2_is_right_for_its_dtype(dtype):
    x = np.concatenate([-np.float32(np.linspace(0, 126, 300001)), -np.exp2(np.float32(np.linspace(-149, 0, 20001)))])
    want = np.exp2(x.astype(np.float64))
    error = np.abs(define.exp2(x, dtype.name) - want) / want
    assert error.max() < {BF16: 1.02e-4, F16: 2.9e-6, F32: 6.7e-8}[dtype]
    # Rounding to the dtype is what remains.
    assert error.max() < {BF16: UNIT[BF16] / 10, F16: UNIT[F16] / 10, F32: 1.2 * UNIT[F32]}[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exp2_of_whole_numbers_is_exact_and_ends_at_zero(dtype):
    whole = -np.arange(127, dtype=np.float32)
    np.testing.assert_array_equal(define.exp2(whole, dtype.name), np.exp2(whole.astype(np.float64)))
    ends = f32([-126.5, -127, -128, -1e30, -np.inf])
    assert bits(define.exp2(ends, dtype.name)).tolist() == [0] * 5
    assert np.isnan(define.exp2(f32([np.nan]), dtype.name)).all()
    assert bits(define.exp2(f32([-0.0, 0.0]), dtype.name)).tolist() == bits([1, 1]).tolist()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_half_has_the_same_power_from_the_whole_number_on_either_side(dtype):
    def polynomial(r: float) -> np.ndarray:
        y = f32(0)
        for term in define.EXP2_TERMS[dtype.name]:
            y = f32(float(y) * r + float(term))  # exact in float64: r is a power of 2
        return y

    down, up = (
        polynomial(0.5) * np.exp2(-1 - np.arange(125, dtype=f32)),
        polynomial(-0.5) * np.exp2(-np.arange(125, dtype=f32)),
    )
    np.testing.assert_array_equal(down.astype(dtype), up.astype(dtype))
    np.testing.assert_array_equal(
        down.astype(dtype), define.exp2(-0.5 - np.arange(125, dtype=f32), dtype.name).astype(dtype)
    )


def fma(x: Any, y: Any, z: Any) -> np.float32:
    """One rounding, by fractions."""
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    zero = math.copysign(1, x) * math.copysign(1, y) < 0 and math.copysign(1, z) < 0
    return np.uint32(to_float32(exact, nearest=True, negative_zero=zero)).view(np.float32)


def power(x: np.float32) -> np.float32:
    """2**x by the same polynomial, its exponent by ldexp."""
    n = round(float(x))
    if n < -126:
        return f32(0)
    y = define.EXP2_TERMS["float32"][0]
    for term in define.EXP2_TERMS["float32"][1:]:
        y = fma(y, f32(x - f32(n)), term)
    return f32(math.ldexp(float(y), n))


def query(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> list[np.float32]:
    """One query in scalars: no arrays, no masks, nothing shared with the definition but its coefficients."""
    c = f32(scale * math.log2(math.e))
    o, m, total = [f32(0)] * v.shape[1], -math.inf, f32(0)
    for first in range(0, len(k), 128):
        t = []
        for row in k[first : first + 128]:
            s = f32(0)
            for x, y in zip(q, row, strict=True):
                s = fma(x, y, s)
            t.append(f32(s * c))
        m_n = float(math.ceil(max(t)))
        p = [power(f32(x - f32(m_n))) for x in t]
        largest = max(m, m_n)
        a, b = (f32(0 if x == -math.inf else math.ldexp(1, int(x - largest))) for x in (m, m_n))
        sums = [f32(0)] * v.shape[1]
        part = f32(0)
        for x, row in zip(p, v[first : first + 128], strict=True):
            sums = [fma(x, y, z) for y, z in zip(row, sums, strict=True)]
            part = fma(x, f32(1), part)
        o = [fma(x, b, f32(y * a)) for x, y in zip(sums, o, strict=True)]
        total, m = fma(part, b, f32(total * a)), largest
    return [fma(x, f32(f32(1) / total), f32(0)) for x in o]


@pytest.mark.parametrize("keys", [1, 127, 128, 129, 300])
def test_a_query_in_scalars_has_the_same_bits(keys):
    q, k, v = drawn(1, 1, 1, 1, keys, 5, dv=3)
    k[0, 0, 0] *= 9  # the maximum moves between leaves
    got, _, _ = define.attention(q * 4, k, v, scale=0.7)
    assert bits(got[0, 0, 0]).tolist() == bits(query(q[0, 0, 0] * 4, k[0, 0], v[0, 0], 0.7)).tolist()


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = np.where(hidden, -np.inf, q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3]))
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize(("dtype", "arithmetic"), [
    (F32, "fma"), (F32, "tf32x3:sm90"), (BF16, "fma"), (BF16, "tensor_core:sm90"), (F16, "tensor_core:sm90"),
])  # fmt: skip
def test_it_is_attention(dtype, arithmetic):
    q, k, v = drawn(2, 4, 2, 5, 200, 24, dtype, dv=10)
    got, _, _ = define.attention(q, k, v, arithmetic=arithmetic, causal_offset=150, out_dtype=F32)
    query, key = np.indices((5, 200))
    error = np.abs(got - exact(q, k, v, key > query + 150))
    assert error.max() < 4 * UNIT[dtype]


def test_nothing_to_see_gives_zeros():
    q, k, v = drawn(2, 1, 1, 3, 130, 4)
    mask = np.ones((3, 130), bool)
    mask[1] = False
    y, m, total = define.attention(q, k, v, mask=mask)
    assert not bits(y[:, :, 1]).any()
    assert (m[:, :, 1] == -np.inf).all()
    assert not total[:, :, 1].any()
    assert y[:, :, 0].all()
    y, m, total = define.attention(q, k[:, :, :0], v[:, :, :0])
    assert not bits(y).any()
    assert not total.any()


def test_special_values_follow_the_steps():
    q, k, v = drawn(1, 1, 1, 4, 3, 2)
    q[0, 0, 0, 0], k[0, 0, 2, 0] = np.nan, 0
    q[0, 0, 1], k[0, 0, 1] = (np.inf, 0), (1, 1)
    v[0, 0, 0, 1] = np.inf
    y, _, _ = define.attention(q, k, v)
    assert (bits(y[0, 0, :2]) == 0x7FFFFFFF).all()  # a NaN product; an infinite one less itself
    assert np.isfinite(y[0, 0, 2:, 0]).all()
    assert (y[0, 0, 2:, 1] == np.inf).all()


def test_an_additive_mask_of_zeros_has_the_bits_of_none():
    q, k, v = drawn(2, 2, 1, 5, 140, 8)
    zeros = np.zeros((1, 1, 5, 140), np.float32)
    zeros[..., ::2] = -0.0
    for got, want in zip(define.attention(q, k, v, mask=zeros), define.attention(q, k, v), strict=True):
        assert_same(got, want)


def test_minus_infinity_hides_as_false_does():
    q, k, v = drawn(2, 2, 1, 5, 140, 8)
    shown = np.random.default_rng(0).random((5, 140)) < 0.6
    for least in (-np.inf, np.finfo(np.float32).min):
        added = np.where(shown, 0, least).astype(np.float32)
        for got, want in zip(define.attention(q, k, v, mask=added), define.attention(q, k, v, mask=shown), strict=True):
            assert_same(got, want)


def test_the_sign_of_a_vanished_sum_is_plus():
    """Sums so small that they vanish, with a minus: a hidden key in the second leaf may not change the zero's sign."""
    q, k, v = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, 132, 1), -40, np.float32), np.zeros((1, 1, 132, 1))
    v = v.astype(np.float32)
    v[0, 0, 0] = -1e-44  # rescaled by 2**-57 to -0 when the second leaf comes
    k[0, 0, 128:, 0], v[0, 0, 128:, 0] = (0, -3, -3, -3), (0, -1e-45, 1, 1)  # 0.05 * -1e-45 is -0
    hidden, _, _ = define.attention(q, k, v, causal_offset=129, scale=1.0)
    alone, _, _ = define.attention(q, k[:, :, :130], v[:, :, :130], scale=1.0)
    assert bits(hidden).item() == bits(alone).item() == 0


GOLDEN = {
    "float32 fma": "bb6831d4bfe52889",
    "bfloat16 tensor_core:sm90": "f3f2bff72981c6c6",
    "float16 fma": "fe6b1b57f923fdfa",
}


def digest(dtype: np.dtype[Any], arithmetic: str) -> str:
    q, k, v = drawn(1, 2, 1, 3, 300, 16, dtype)
    found = hashlib.sha256()
    for x in define.attention(q, k, v, arithmetic=arithmetic, causal_offset=290, start=[3]):
        found.update(canonical(x).tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("case", GOLDEN)
def test_the_definition_is_what_it_was(case):
    dtype, arithmetic = case.split()
    assert digest({x.name: x for x in DTYPES}[dtype], arithmetic) == GOLDEN[case]


def _rounded_down(monkeypatch):
    monkeypatch.setattr(define.np, "ceil", np.floor)


def _no_rounding(monkeypatch):
    monkeypatch.setattr(define.np, "ceil", lambda x: x)


def _half_leaves(monkeypatch):
    monkeypatch.setattr(define, "LEAF", 64)


def _backwards(monkeypatch):
    monkeypatch.setattr(define, "range", lambda *args: range(*args)[::-1] if len(args) == 3 else range(*args), False)


@pytest.mark.parametrize("broken", [_rounded_down, _no_rounding, _half_leaves, _backwards])
def test_each_choice_reaches_the_bits(broken, monkeypatch):
    """Leaf length, whole maxima and the order of leaves are in the golden hash."""
    broken(monkeypatch)
    assert digest(F32, "fma") != GOLDEN["float32 fma"]
