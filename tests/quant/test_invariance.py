"""Batch invariance of quantized products: every format and path, on one thread and on two, up to M = 4096.

A row of a result is compared with the same row of one product of 4096 rows, of which some rows are the definition's.
Other relations, row by row: test_relations.py.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.formats.test_blocks import same
from tests.products import product
from tests.quant.draws import WEIGHTS, values
from tests.quant.test_linear import defined, weight

import isogemm

BATCHES = (
    *(1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257),
    *(511, 512, 1000, 1024, 2048, 4096),
)
PATHS = {
    "q8": (np.float32, {"activations": "q8"}, False),
    "in place": (np.float32, {"activations": "q8"}, True),
    "fp32": (np.float32, {"activations": "fp32"}, False),
    "bfloat16": (ml_dtypes.bfloat16, {}, False),
    "float16": (np.float16, {}, False),
    "bfloat16 to q8": (ml_dtypes.bfloat16, {"activations": "q8"}, False),
}
each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
each_path = pytest.mark.parametrize("path", PATHS)


def operands(fmt, path: str, n: int, k: int, m: int):
    """Finite weights, activations [m, k], and the product as a function of activations and threads."""
    dtype, options, native = PATHS[path]
    w = isogemm.quantize(values("normal", n, k, 3), fmt)
    w = w.in_place() if native else w
    x = values("heavy", m, k).astype(dtype)

    def linear(rows: np.ndarray, count: int = 2, into: np.ndarray | None = None) -> np.ndarray:
        isogemm.set_num_threads(count)
        return isogemm.linear(rows, w, out=into, **options)

    return w, x, linear


def anchor(path: str, w, x: np.ndarray) -> np.ndarray:
    """The definition."""
    dtype, options, _ = PATHS[path]
    if options.get("activations") == "q8":
        return defined(x, w)
    wide = w.dequantize() if dtype is np.float32 else w.dequantize(x.dtype)
    return product(x, wide.T)


@each_format
@each_path
def test_every_batch(fmt, path):
    """Population and position: the first M rows, the last M, with one thread and with two."""
    w, x, linear = operands(fmt, path, 35, 512, 4096)
    whole = linear(x)
    some = [0, 1, 2047, 4095]
    same(whole[some], anchor(path, w, x[some]))
    for i, m in enumerate(BATCHES):
        same(linear(x[:m], 1 + i % 2), whole[:m])
        if m < 2048:
            same(linear(x[-m:], 2 - i % 2), whole[-m:])
    same(linear(x, 1), whole)


@each_format
@each_path
def test_schedules_threads_layouts_and_forms(fmt, path):
    """Chunks and single rows on either number of threads, reruns, strides of either sign, leading dimensions."""
    _, x, linear = operands(fmt, path, 50, 512, 300)
    whole = linear(x)
    order = np.random.default_rng(0).permutation(len(x))
    same(linear(x[order], 1), whole[order])
    others = x.copy()
    others[:100], others[128:] = 3 * others[:100], 0
    same(linear(others)[100:128], whole[100:128])
    same(np.concatenate([linear(x[:100], 1), linear(x[100:256])]), whole[:256])
    same(np.concatenate([linear(x[:255]), *(linear(x[i : i + 1]) for i in range(255, 270))]), whole[:270])
    same(linear(x), whole)
    same(linear(np.asfortranarray(x)), whole)
    same(linear(np.repeat(x, 2, axis=1)[:, ::2], 1), whole)
    same(linear(x[::-1])[::-1], whole)
    same(linear(x.reshape(3, 100, 512)), whole.reshape(3, 100, 50))
    same(linear(x[7]), whole[7])
    out = np.full((300, 101), np.nan, whole.dtype)
    linear(x, into=out[:, 1:101:2])
    same(np.ascontiguousarray(out[:, 1:101:2]), whole)
    assert np.isnan(out[:, 0::2].astype(np.float32)).all()


@each_format
@each_path
def test_few_rows_on_two_threads(fmt, path):
    """Weights that are large enough for a second thread already at one row."""
    w, x, linear = operands(fmt, path, 1040, 1024, 33)
    whole = linear(x, 1)
    same(whole[[0, 32]][:, 1000:], np.ascontiguousarray(anchor(path, w, x[[0, 32]])[:, 1000:]))
    for m in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33):
        for count in (1, 2):
            same(linear(x[:m], count), whole[:m])
            same(linear(x[33 - m :], count), whole[33 - m :])


@each_format
def test_random_blocks_in_large_batches(fmt):
    """All bit patterns of codes and scales, also those that make infinities."""
    w, x = weight(fmt, 19, 2), values("normal", 1000, 2 * fmt.block)
    want = defined(x, w)
    same(isogemm.linear(x, w), want)
    same(isogemm.linear(x, w.in_place()), want)
