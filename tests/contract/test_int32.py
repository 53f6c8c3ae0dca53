"""The definition of products with quantized weights, against exact rational arithmetic and against itself."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from isogemm.contract import int32, reference
from isogemm.contract.int32 import Codes, evaluate, quantize_activations
from isogemm.errors import ContractError, DTypeError, ShapeError


def codes(n: int, k: int, block: int, sub: int, *, offset: bool, seed: int = 0) -> Codes:
    rng = np.random.default_rng(seed)
    width, groups = (n, k // block), (n, k // sub)
    return Codes(
        block, sub, rng.integers(-32, 32, (n, k), dtype=np.int32), rng.integers(-32, 64, groups, dtype=np.int32),
        rng.standard_normal(width).astype(np.float16).astype(np.float32),
        rng.integers(0, 64, groups, dtype=np.int32) if offset else None,
        rng.standard_normal(width).astype(np.float16).astype(np.float32) if offset else None,
    )  # fmt: skip


def rounded(x: Fraction) -> np.float32:
    """To the nearest float32, halves to even; for values in the normal range."""
    if x == 0:
        return np.float32(0)
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return np.float32(float(round(x / unit) * unit))


SHAPES = [(32, 32), (256, 16), (256, 32)]


@pytest.mark.parametrize(("block", "sub"), SHAPES)
@pytest.mark.parametrize("offset", [False, True])
def test_the_formula_in_rational_numbers(block, sub, offset):
    m, n, k = 3, 4, 3 * block
    x, w = np.random.default_rng(1).standard_normal((m, k)).astype(np.float32), codes(n, k, block, sub, offset=offset)
    a = quantize_activations(x, block)
    want = np.zeros((m, n), np.float32)
    for i, j in np.ndindex(m, n):
        acc = np.float32(0)
        for b in range(k // block):
            total = shift = 0
            for g in range(b * block // sub, (b + 1) * block // sub):
                part = range(g * sub, (g + 1) * sub)
                total += int(w.scales[j, g]) * sum(int(w.q[j, p]) * int(a.q[i, p]) for p in part)
                if w.mins is not None:
                    shift += int(w.mins[j, g]) * sum(int(a.q[i, p]) for p in part)
            terms = [(total, w.d)] + ([(shift, w.offset)] if w.offset is not None else [])
            for integer, scale in terms:
                step = rounded(Fraction(float(scale[j, b])) * Fraction(float(a.d[i, b])))
                product = Fraction(float(rounded(Fraction(integer)))) * Fraction(float(step))
                acc = rounded(product + Fraction(float(acc)))
        want[i, j] = acc
    np.testing.assert_array_equal(evaluate(x, w).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("block", [32, 256])
def test_activations_by_hand(block):
    x = np.zeros((1, 4 * block), np.float32)
    x[0, :3] = 127, -63.5, 0.5  # scale 1: halves
    x[0, block : block + 3] = 1.5, -1.0, 0.25
    x[0, 3 * block] = 1e-40  # 1 / scale is infinite
    a = quantize_activations(x, block)
    halves = [-64, 1] if block == 32 else [-64, 0]  # away from zero, and to even
    assert list(a.q[0, :3]) == [127, *halves]
    assert a.q[0, block] == 127
    assert not a.q[0, 2 * block :].any()
    assert list(a.d[0, [0, 2, 3]]) == [1, 0, 0]
    scale = np.float32(1.5) / np.float32(127)
    assert a.d[0, 1] == (
        np.float32(np.float16(scale)) if block == 32 else np.float32(1) / (np.float32(127) / np.float32(1.5))
    )


@pytest.mark.parametrize(("block", "sub"), SHAPES)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_reaches_its_row_alone(block, sub, wrong):
    x = np.random.default_rng(2).standard_normal((4, 2 * block)).astype(np.float32)
    w = codes(5, 2 * block, block, sub, offset=True)
    want = evaluate(x, w)
    x[2, block + 3] = wrong
    a = quantize_activations(x, block)
    assert np.isnan(a.d[2, 1])
    assert not a.q[2, block:].any()
    got = evaluate(x, w).view(np.uint32)
    assert (got[2] == 0x7FFFFFFF).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0).view(np.uint32))


@pytest.mark.parametrize(("block", "sub"), SHAPES)
def test_orders_and_cuts(block, sub):
    k = 2048
    x, w = np.random.default_rng(3).standard_normal((3, k)).astype(np.float32), codes(4, k, block, sub, offset=True)

    def part(start: int, stop: int) -> Codes:
        span, b = slice(start, stop), slice(start // block, stop // block)
        subs = slice(start // sub, stop // sub)
        return Codes(block, sub, w.q[:, span], w.scales[:, subs], w.d[:, b], w.mins[:, subs], w.offset[:, b])

    def run(start: int, stop: int, c: np.ndarray | None = None) -> np.ndarray:
        return evaluate(x[:, start:stop], part(start, stop), c=c)

    whole = evaluate(x, w)
    for cut in range(0, k + 1, 256):
        np.testing.assert_array_equal(run(cut, k, run(0, cut)), whole)
    leaf = run(0, 768) + run(768, 1536) + run(1536, k)
    np.testing.assert_array_equal(evaluate(x, w, "int32/leaf768"), leaf)
    tree = (run(0, 512) + run(512, 1024)) + (run(1024, 1536) + run(1536, k))
    np.testing.assert_array_equal(evaluate(x, w, "int32/tree4"), tree)
    assert (leaf != whole).any()
    for i in range(3):
        np.testing.assert_array_equal(evaluate(x[i : i + 1], w), whole[i : i + 1])


def test_what_it_does_not_take():
    x, w = np.ones((2, 64), np.float32), codes(3, 64, 32, 32, offset=False)
    with pytest.raises(ContractError, match="int32"):
        evaluate(x, w, "fma/chain")
    with pytest.raises(ShapeError):
        evaluate(x[:, :32], w)
    with pytest.raises(DTypeError):
        evaluate(x.astype(int), w)
    with pytest.raises(ContractError, match="multiple of the block, 256"):
        evaluate(x, w, "int32/leaf32")
    with pytest.raises(DTypeError, match="quantized"):
        reference.evaluate(x, x.T, "int32/chain")
    assert int32.evaluate(np.ones((0, 64), np.float32), w).shape == (0, 3)


@pytest.mark.parametrize(("shape", "block"), [((2, 40), 32), ((2, 64), 256), ((64,), 32), ((2, 64), 64)])
def test_activations_are_whole_blocks(shape, block):
    with pytest.raises(ShapeError, match="32 or 256"):
        quantize_activations(np.ones(shape, np.float32), block)
