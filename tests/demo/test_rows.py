"""The encoder's row functions: right against float64, and blind to every other row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from isogemm.contract import compare
from isogemm.demo import rows

RNG = np.random.default_rng(3)


def _norm(x):
    gamma, beta = np.linspace(0.5, 2, x.shape[1], dtype=x.dtype), np.linspace(-1, 1, x.shape[1], dtype=x.dtype)
    return rows.layer_norm(x, gamma, beta, 1e-12)


BY_ROW = {"layer_norm": _norm, "gelu": rows.gelu, "unit": rows.unit}


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize("n", [1, 7, 16, 33, 384])
def test_a_row_alone_has_the_bits_it_has_among_others(name, n):
    x = RNG.standard_normal((37, n)).astype(np.float32)
    together = BY_ROW[name](x)
    for i in range(len(x)):
        assert compare.differing(BY_ROW[name](x[i : i + 1].copy()), together[i : i + 1]) == 0
    assert compare.differing(BY_ROW[name](x[::-1].copy())[::-1].copy(), together) == 0


def test_layer_norm_against_float64():
    x = RNG.standard_normal((5, 96)) * 3 + 1
    expected = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    got = rows.layer_norm(x.astype(np.float32), np.ones(96, np.float32), np.zeros(96, np.float32), 1e-12)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_gelu_is_the_exact_one():
    x = np.linspace(-6, 6, 121)[None]
    expected = [[0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x[0]]]
    np.testing.assert_allclose(rows.gelu(x), expected, rtol=1e-14, atol=0)


def test_softmax_neither_reads_nor_weighs_padding():
    scores = RNG.standard_normal((3, 2, 6, 6)).astype(np.float32)
    lengths = np.array([6, 4, 1])
    padded = np.full((3, 2, 6, 11), np.nan, np.float32)
    padded[..., :6] = scores
    for i, length in enumerate(lengths):
        padded[i, ..., length:] = np.nan
    got = rows.softmax(padded, lengths, 0.25)
    for i, length in enumerate(lengths):
        alone = rows.softmax(scores[i : i + 1, ..., :length].copy(), lengths[i : i + 1], 0.25)
        assert compare.differing(got[i : i + 1, ..., :length].copy(), alone) == 0
        assert not compare.bits(got[i, ..., length:].copy()).any()
        powers = np.exp(0.25 * scores[i, ..., :length].astype(np.float64))
        np.testing.assert_allclose(alone[0], powers / powers.sum(-1, keepdims=True), rtol=3e-7)


def test_mean_pool_reads_only_the_tokens_that_are_there():
    x = RNG.standard_normal((2, 5, 7)).astype(np.float32)
    x[1, 3:] = np.nan
    got = rows.mean_pool(x, np.array([5, 3]))
    expected = np.stack([x[0].astype(np.float64).mean(0), x[1, :3].astype(np.float64).mean(0)])
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    longer = np.full((1, 9, 7), np.nan, np.float32)
    longer[:, :3] = x[1, :3]
    assert compare.differing(rows.mean_pool(longer, np.array([3])), got[1:]) == 0


def test_a_zero_row_has_no_direction_and_stays_zero():
    assert not rows.unit(np.zeros((1, 4), np.float32)).any()
