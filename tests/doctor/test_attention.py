"""Attention: what goes wrong around its two products."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.doctor import diagnose_attention
from isogemm.errors import DTypeError, ShapeError

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


def test_values_of_zeros_are_right_as_they_are():
    zeros = np.zeros_like(V)
    assert diagnose_attention(np.zeros_like(Q), Q, K, zeros).verdict == "right"
    assert diagnose_attention(np.ones_like(Q), Q, K, zeros).verdict == "wrong"


@pytest.mark.parametrize(
    ("error", "text", "observed", "k", "v", "options"),
    [
        (ShapeError, r"observed: limit: \[6, 21, 16\]", Q[:, :5], K, V, {}),
        (ShapeError, r"shape of mask: limit: one that broadcasts to \[6, 21, 21\]", Q, K, V, {"mask": MASK[:, :4]}),
        (ShapeError, "kv_heads", Q, K[:0], V[:0], {}),
        (ShapeError, "kv_heads", Q, K[:, :0], V[:, :0], {}),
        (ShapeError, "kv_heads", Q, K, V[0], {}),
        (DTypeError, "dtype of observed", Q.astype(np.int32), K, V, {}),
    ],
)
def test_what_cannot_be_looked_at_is_refused(error, text, observed, k, v, options):
    with pytest.raises(error, match=text):
        diagnose_attention(observed, Q, k, v, **options)
