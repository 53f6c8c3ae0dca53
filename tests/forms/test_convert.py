"""Conversions between batched forms: the same bits, on views, with their conditions checked."""

from __future__ import annotations

import numpy as np
import pytest
from tests.products import BF16, DTYPES, F32, assert_same, product, values

import isogemm
from isogemm.errors import LayoutError, OptionError, ShapeError
from isogemm.forms import convert as forms

X, W, EACH = values((4, 5, 24), seed=1), values((24, 3), seed=2), values((4, 24, 3), seed=3)
ROOM = values((4, 9, 24), seed=4)
CASES = [
    ("wide", X, np.broadcast_to(W, (4, 24, 3))),
    ("wide", X[:, :1], [W] * 4),
    ("wide", [X[0]] * 4, values((4, 3, 24), seed=5).swapaxes(1, 2)),
    ("wide", [X[0]], [W]),
    ("gemm_strided_batched", [X[0]] * 4, EACH),
    ("gemm_strided_batched", ROOM[:, :5], [W] * 4),
    ("gemm_strided_batched", list(X), list(EACH)),
    ("gemm_strided_batched", X[::-1], EACH),
    ("gemm_batched", [X[0], X[1], X[3]], [W] * 3),
    ("gemm_batched", [X[0], X[0].copy()], [W] * 2),
    ("gemm_grouped", [X[0], X[1, :2]], [W, W]),
    ("gemm_grouped", [X[0], X[1, :0]], [W, EACH[0]]),
]


@pytest.mark.parametrize(("form", "a", "b"), CASES)
def test_advice_and_its_bits(form, a, b):
    advice = forms.advise(a, b)
    assert advice.form == form
    assert str(advice).startswith(f"use {form}\n")
    assert all(c.why for c in advice.conditions)
    got = advice.run()
    assert len(got) == len(a)
    for z, x, y in zip(got, a, b, strict=True):
        assert_same(np.ascontiguousarray(z), product(x, y))


def test_advice_is_of_products_that_there_are():
    with pytest.raises(ShapeError, match=r"rows of b\[0\]: limit: 24, as a\[0\] has columns; got: 5"):
        forms.advise(X, X)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_form_of_one_batch(dtype):
    a, b = values((4, 5, 24), dtype, seed=1), values((24, 3), dtype, seed=2)
    want = np.stack([product(x, b, "fma/leaf8") for x in a])
    shared = np.broadcast_to(b, (4, 24, 3))
    options = {"contract": "fma/leaf8"}
    assert_same(np.stack([isogemm.gemm(x, b, **options) for x in a]), want)
    assert_same(isogemm.gemm_strided_batched(a, forms.strided([b] * 4), **options), want)
    assert_same(np.stack(isogemm.gemm_batched(forms.pointer_array(a), forms.pointer_array(shared), **options)), want)
    assert_same(forms.wide(a, shared, **options), want)


def test_strided_is_a_view():
    back = forms.strided([X[3], X[1]])
    assert back.strides[0] == -2 * X.strides[0]
    assert np.shares_memory(back, X)
    assert_same(np.ascontiguousarray(back), X[3::-2].copy())


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([X[0], X[1, :2]], "shape"),
        ([X[0], X[0].copy()], "another buffer"),
        ([X[0], X[1], X[3]], "distances"),
        ([], "no items"),
        ([X[0], X[1].astype(BF16)], "dtype"),
    ],
)
def test_what_no_stride_describes(items, why):
    with pytest.raises(LayoutError, match=why):
        forms.strided(items)


def test_wide_needs_a_shared_factor():
    with pytest.raises(LayoutError, match="neither a nor b"):
        forms.wide(X, EACH)


@pytest.mark.parametrize("call", [forms.advise, forms.wide])
@pytest.mark.parametrize(
    ("a", "b"), [(X, EACH[:2]), (X[:3], np.broadcast_to(W, (2, 24, 3))), ([X[0]] * 3, values((2, 3, 24)).mT), (X, [])]
)
def test_items_of_a_and_b_are_as_many(call, a, b):
    with pytest.raises(ShapeError, match=f"^items in b: limit: as many as in a; got: {len(b)}; .*: {len(a)}$"):
        call(a, b)


def test_products_that_there_are_not_are_named_by_their_item():
    for call in (forms.advise, forms.wide):
        with pytest.raises(ShapeError, match=r"rows of b\[1\]: limit: 24, as a\[1\] has columns; got: 5"):
            call([X[0], X[1]], [W, X[2]])


@pytest.mark.parametrize("form", ["packed", "broadcast", "pointers"])
@pytest.mark.parametrize(("heads", "kv", "n"), [(8, 2, 3), (8, 8, 1), (4, 1, 5), (32, 8, 1), (6, 2, 0)])
def test_grouped_query_attention(form, heads, kv, n):
    q, k = values((heads, n, 16), seed=1), values((kv, 7, 16), seed=2)
    want = np.empty((heads, n, 7), F32)
    for h in range(heads):
        want[h] = product(q[h], k[h // (heads // kv)].T)
    assert_same(np.ascontiguousarray(forms.gqa_scores(q, k, form=form)), want)


def test_grouped_query_attention_as_models_store_it():
    """[tokens, heads, head_dim] seen by head: rows of a group are not evenly spaced, so packing would copy."""
    q, k = values((3, 8, 16), seed=1).swapaxes(0, 1), values((7, 2, 16), seed=2).swapaxes(0, 1)
    with pytest.raises(LayoutError, match="packed query"):
        forms.gqa_scores(q, k)
    assert_same(forms.gqa_scores(q, k, form="broadcast"), np.ascontiguousarray(forms.gqa_scores(q, k, form="pointers")))
    assert_same(forms.gqa_scores(q[:, :1], k), forms.gqa_scores(q[:, :1], k, form="broadcast"))  # decode packs


def test_one_constant_stride_cannot_serve_groups():
    q, k = values((32, 1, 16)), values((8, 7, 16))
    with pytest.raises(LayoutError, match="32 query heads on 8 key heads"):
        forms.gqa_scores(q, k, form="strided")
    assert forms.gqa_scores(q, k[:1], form="strided").shape == (32, 1, 7)
    with pytest.raises(ShapeError, match="multiple"):
        forms.gqa_scores(q, k[:5])
    for form in ("loop", ["packed"], None):
        with pytest.raises(OptionError, match=r"^form: limit: one of packed, "):
            forms.gqa_scores(q, k, form=form)
        with pytest.raises(OptionError, match=r"^form: "):
            forms.gqa_scores(q[:0], k, form=form)


@pytest.mark.parametrize("form", ["packed", "broadcast", "pointers", "strided"])
@pytest.mark.parametrize(("kv", "n"), [(1, 3), (2, 3), (2, 0)])
def test_no_query_heads_have_no_scores(form, kv, n):
    scores = forms.gqa_scores(values((0, n, 16), BF16), values((kv, 7, 16), BF16), form=form)
    assert (scores.shape, scores.dtype) == ((0, n, 7), BF16)
