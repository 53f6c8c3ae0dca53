"""Attention: what goes wrong around its two products."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.doctor import diagnose_attention
from isogemm.errors import DTypeError, OptionError, ShapeError

RNG = np.random.default_rng(5)
Q, K, V = (RNG.standard_normal(s).astype(np.float32) for s in ((6, 21, 16), (3, 21, 16), (3, 21, 16)))
MASK = np.tri(21, dtype=bool)


def attention(scale=0.25, mask=MASK, group=lambda h: h // 2):
    out = []
    for h in range(6):
        scores = scale * Q[h] @ K[group(h)].T
        scores = np.where(mask, scores, -np.inf)
        with np.errstate(all="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ V[group(h)])
    return np.stack(out).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"scale": 1.0}, "softmax-scale"),
        ({"mask": MASK.T}, "mask-transposed"),
        ({"group": lambda h: h % 3}, "gqa-mapping"),
    ],
)
def test_what_is_wrong(options, name):
    found = diagnose_attention(attention(**options), Q, K, V, causal=True)
    assert (found.verdict, found.causes[0].name) == ("wrong", name)


def test_the_last_query_sees_all_keys():
    assert diagnose_attention(attention()[:, -5:], Q[:, -5:], K, V, causal=True).verdict == "right"


def test_a_mask_of_either_kind_holds_beside_the_causal_one():
    some = np.ones((21, 21), bool)
    some[5:, 2] = False
    for mask in (some, np.where(some, 0, -np.inf)):
        assert diagnose_attention(attention(mask=some & MASK), Q, K, V, mask=mask, causal=True).verdict == "right"
        assert diagnose_attention(attention(mask=some), Q, K, V, mask=mask, causal=True).verdict == "wrong"


def test_what_is_right():
    assert diagnose_attention(attention(), Q, K, V, causal=True).verdict == "right"
    assert diagnose_attention(attention(), Q, K, V, mask=MASK).verdict == "right"
    found = diagnose_attention(attention() + 1, Q, K, V, causal=True)
    assert (found.verdict, found.causes) == ("wrong", ())
    with pytest.raises(ShapeError, match="kv_heads"):
        diagnose_attention(attention(), Q, K[:, :, :5], V)


def test_what_has_no_number_or_no_key():
    """NaN is counted as wrong; of a query that sees no key NaN and zeros are right; zeros of zeros are right."""
    found = diagnose_attention(attention() * np.nan, Q, K, V, causal=True)
    assert (found.verdict, found.wrong) == ("wrong", found.elements)
    blind = MASK & (np.arange(21)[:, None] != 4)
    left = attention(mask=blind)
    for seen in (left, np.nan_to_num(left)):
        assert diagnose_attention(seen, Q, K, V, mask=blind).verdict == "right"
    assert diagnose_attention(np.zeros_like(Q), Q, K, 0 * V).verdict == "right"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"observed": attention()[:1]}, ShapeError, r"shape of observed: .* nearest legal choice: \[6, 21, 16\]"),
        ({"observed": attention().astype(np.int32)}, DTypeError, "dtype of observed: .* got: int32"),
        ({"q": Q[None], "k": K[None], "v": V[None]}, ShapeError, r"nearest legal choice: .* q\[0\]"),
        ({"k": K[:0], "v": V[:0]}, ShapeError, "heads a multiple of kv_heads"),
        ({"q": Q[..., :0], "k": K[..., :0]}, ShapeError, "d of q and k: limit: at least 1"),
        ({"mask": np.ones((3, 3), bool)}, ShapeError, r"shape of mask: .* got: \[3, 3\]; .* \[21, 21\]"),
        ({"mask": MASK.astype(np.int64)}, DTypeError, "dtype of mask: limit: bool, .* got: int64"),
        ({"mask": "causal"}, DTypeError, "dtype of mask"),
        ({"scale": "x"}, DTypeError, "scale: limit: a number"),
        ({"scale": 0}, OptionError, "scale: limit: a positive number; got: 0"),
    ],
)
def test_what_does_not_fit_is_refused(given, error, said):
    with pytest.raises(error, match=said):
        diagnose_attention(**{"observed": attention(), "q": Q, "k": K, "v": V} | given)
