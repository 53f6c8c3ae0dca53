"""Rows of a product with quantized weights on the CPU: the same alone, in any batch and place, beside anything."""

from __future__ import annotations

import numpy as np
import pytest
from tests.products import BF16, F16, F32, assert_same
from tests.quant.draws import WEIGHTS, values
from tests.quant.test_linear import weight

import isogemm

SWEEP = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 512, 1000,
         1024, 2048, 4096)  # fmt: skip
PATHS = {"q8": (F32, "q8"), "fp32": (F32, "fp32"), "bf16": (BF16, None), "fp16": (F16, None)}
ROWS = 23


def posed(fmt, path: str, n: int = 19):
    """(x, w, how, each row of x alone)."""
    dtype, how = PATHS[path]
    w = weight(fmt, n, 2)
    with np.errstate(over="ignore"):
        x = values("heavy", ROWS, w.shape[1], seed=2).astype(dtype)
    alone = np.concatenate([isogemm.linear(x[i : i + 1], w, activations=how) for i in range(ROWS)])
    return x, w, how, alone


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_population_and_position(fmt, path):
    x, w, how, alone = posed(fmt, path)
    rng = np.random.default_rng(1)
    for m in SWEEP:
        rows = rng.permutation(np.arange(m) % ROWS)
        assert_same(isogemm.linear(x[rows], w, activations=how), alone[rows])


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_neighbours_padding_chunks_and_batches(fmt, path):
    x, w, how, alone = posed(fmt, path)

    def linear(x):
        return isogemm.linear(x, w, activations=how)

    rows = np.arange(256) % ROWS
    whole, want = x[rows], alone[rows]
    beside = whole[:128].copy()
    beside[100:] = 0
    assert_same(linear(beside)[:100], want[:100])  # padding, 100 + 28
    beside[100:], beside[50] = np.nan, np.inf
    got = linear(beside)
    assert_same(np.delete(got[:100], 50, 0), np.delete(want[:100], 50, 0))
    assert_same(np.concatenate([linear(whole[:100]), linear(whole[100:])]), want)  # 256 = 100 + 156
    assert_same(linear(whole.reshape(4, 64, -1)), want.reshape(4, 64, -1))
    for part in (slice(0, 7), slice(3, 16), slice(18, 19)):
        got = isogemm.linear(whole, w[part], activations=how)
        assert_same(got, np.ascontiguousarray(want[:, part]))
