"""Lists of products of different sizes: what one of them gets wrong, and what only a list can."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import isogemm
from isogemm import quantize
from isogemm.doctor import diagnose
from isogemm.errors import ShapeError

RNG = np.random.default_rng(3)
COUNTS, K, N = (19, 0, 7, 33, 12), 48, 40
STARTS = np.cumsum((0, *COUNTS))
TOKENS = RNG.standard_normal((STARTS[-1], K)).astype(np.float32)
A = [TOKENS[i:j] for i, j in itertools.pairwise(STARTS)]
B = [RNG.standard_normal((K, N)).astype(np.float32) for _ in COUNTS]
RIGHT = [a @ b for a, b in zip(A, B, strict=True)]


def late():
    """Each expert begins one token late."""
    longer = np.concatenate([TOKENS, TOKENS[:1]])
    return [longer[i + 1 : j + 1] @ b for (i, j), b in zip(itertools.pairwise(STARTS), B, strict=True)]


def short():
    """Experts of fewer rows than a tile are left out."""
    return [x if len(x) >= 16 else np.full_like(x, np.nan) for x in RIGHT]


@pytest.mark.parametrize(
    ("observed", "name", "words"),
    [
        ([a @ B[(g + 1) % 5] for g, a in enumerate(A)], "pointer-offset", "product 0: reads B of product 1"),
        ([a @ B[0] for a in A], "pointer-offset", "products 2, 3, 4: reads B of product 0"),
        (late(), "pointer-offset", "A begins +1 lines from where it lies"),
        (short(), "m-tail", "product 2: 7 rows of it were never written"),
        ([a[:, :32] @ b[:32] for a, b in zip(A, B, strict=True)], "k-tail", "products 0, 2, 3, 4: K ends at 32 of 48"),
        (
            [1.875 * x for x in RIGHT],
            "alpha-type",
            "products 0, 2, 3, 4: alpha 1 as float64 read as float32, part 1 of 2: 1.875",
        ),
    ],
)
def test_what_a_list_gets_wrong(observed, name, words):
    found = diagnose(observed, A, B)
    assert (found.verdict, found.causes[0].name) == ("wrong", name)
    assert words in found.causes[0].parameter
    assert found.causes[0].explained == 1
    assert found.first[0].startswith("product ")


def test_products_of_one_size_are_swapped_left_as_they_were_or_read_by_another_leading_dimension():
    a, b, before = (RNG.standard_normal((2, *s)).astype(np.float32) for s in ((9, K), (K, N), (9, N)))
    a = [np.pad(x, ((0, 0), (0, p)), constant_values=9)[:, :K] for x, p in zip(a, (3, 8), strict=True)]
    right, ld = [x @ y for x, y in zip(a, b, strict=True)], 4 * (K + 3)
    other = np.lib.stride_tricks.as_strided(a[1], (9, K), (ld, 4)) @ b[1]
    for observed, name, words in (
        (right[::-1], "pointer-offset", "product 1: holds what belongs to product 0"),
        ([right[0], before[1]], "m-tail", "product 1: 9 rows of it were never written"),
        ([right[0], other], "lda", f"product 1: lda is {K + 3}, another product's, not {K + 8}"),
    ):
        found = diagnose(observed, a, list(b), list(before)).causes[0]
        assert name == found.name
        assert words in found.parameter


def test_a_right_list_is_right():
    found = diagnose(isogemm.gemm_grouped(A, B, contract="fma/chain"), A, B, contract="fma/chain")
    assert (found.verdict, found.causes, found.elements) == ("right", (), sum(COUNTS) * N)
    assert found.order == "fma/chain"
    assert diagnose([RIGHT, RIGHT], A, B).verdict == "right"
    other = [x.copy() for x in RIGHT]
    other[3][2, 2] += 9
    assert diagnose([RIGHT, other], A, B).causes[0].name == "race"
    with pytest.raises(ShapeError, match="items of b"):
        diagnose(RIGHT, A, B[:2])


def test_lists_of_any_layout():
    """Sizes that differ in all three extents, transposed, quantized; one product alone is wrong."""
    sizes = [(5, 7, 11), (13, 3, 17), (8, 9, 21)]
    a = [RNG.standard_normal((k, m)).astype(np.float32) for m, _, k in sizes]
    b = [RNG.standard_normal((n, k)).astype(np.float32) for _, n, k in sizes]
    observed = [x.T @ y.T for x, y in zip(a, b, strict=True)]
    assert diagnose(observed, a, b, trans_a="T", trans_b="T").verdict == "right"
    observed[2] = observed[2] - np.outer(a[2][-1], b[2][:, -1])
    found = diagnose(observed, a, b, trans_a="T", trans_b="T")
    assert (found.wrong, found.causes[0].name) == (72, "k-tail")
    w = [quantize(RNG.standard_normal((n, 64)).astype(np.float32), "Q8_0") for n in (9, 6)]
    x = [RNG.standard_normal((m, 64)).astype(np.float32) for m in (4, 5)]
    assert diagnose([y @ q.dequantize().T for y, q in zip(x, w, strict=True)], x, w).verdict == "right"
