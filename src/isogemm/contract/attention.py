"""What attention computes: the definition of ``softmax(scale * q @ k.T + mask) @ v``, written to be read.

A query's result is a function of its own row of q, of the keys and values that it sees, in their order, and of nothing
else: not of the batch, of other queries, of how queries are cut into chunks, of a longer cache behind the keys or of
padding before them. docs/design/0008-attention.md says why each step is as it is.

Keys are counted from `start`, of which each query may have its own, and cut into leaves of LEAF keys. A is the
arithmetic of products.

1. ``s = chain_A over D of q * k`` from +0, ``t = s * c``, ``t = t + mask * LOG2E`` with an additive mask, each step
   rounded to float32; -inf where the key is hidden.
2. In each leaf: ``m_n = ceil(largest t that is no NaN)``, -inf without one; ``u = m_n``, or 0 where that is -inf;
   ``p = exp2(t - u)``, rounded to the dtype of v.
3. ``[o_n | l_n] = chain_A over the leaf's keys of p * [v | 1]``, ascending from +0.
4. Leaves ascending, from ``m = -inf, o = l = +0``: ``m' = max(m, m_n)``, ``u = m'`` or 0 where that is -inf,
   ``a = exp2(m - u)``, ``b = exp2(m_n - u)`` or -0 where m_n is -inf; ``o = fma(o_n, b, o * a)`` and l likewise.
   Maxima are whole numbers, so a and b are powers of two.
5. ``y = fma(o, 1 / l, +0)``, +0 where l is 0; rounded once. That last +0 gives every zero one sign: a hidden key in a
   leaf may turn an accumulator of -0 into +0, and nothing else.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import finfo

from .reference import canonical, evaluate
from .rows import _fma, _horner, _pinned

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]
f32 = np.float32

LEAF = 128  # keys
LOG2E = f32(float.fromhex("0x1.715476p+0"))
EXP2_LEAST = f32(-127)  # below, exp2 is +0
# 1.5 * 2**23 + 127: adding it rounds to a whole number, whose low 8 bits are then the biased exponent.
EXP2_SHIFT = f32(12582912 + 127)


def _floats(*texts: str) -> tuple[np.float32, ...]:
    return tuple(f32(float.fromhex(text)) for text in texts)


# 2**r on |r| <= 1/2, highest power first, by the dtype that the result is rounded to. The constant term is 1, so whole
# numbers are exact. Largest relative errors: 1.0e-4, 2.8e-6 and 3.0e-9, before the roundings of float32.
EXP2_TERMS = {
    "bfloat16": _floats("0x1.c2a252p-5", "0x1.f00c4cp-3", "0x1.62f5fap-1", "0x1p+0"),
    "float16": _floats("0x1.3a051ap-7", "0x1.c9fc68p-5", "0x1.ec036ep-3", "0x1.62e12cp-1", "0x1p+0"),
    "float32": _floats(
        "0x1.416b5ep-13", "0x1.5f082ep-10", "0x1.3b2de0p-7", "0x1.c6af7cp-5", "0x1.ebfbdcp-3", "0x1.62e430p-1", "0x1p+0"
    ),
}


def factor(scale: float | None, d: int) -> np.float32:
    """c of the definition: ``scale * log2(e)`` in float64, rounded once; `scale` is by default 1 / sqrt(d)."""
    return _factor(None if scale is None else float(scale), d)


@lru_cache(maxsize=1024)
@_pinned
def _factor(scale: float | None, d: int) -> np.float32:
    return f32((1.0 / math.sqrt(max(d, 1)) if scale is None else scale) * math.log2(math.e))


@_pinned
def exp2(x: Any, dtype: str = "float32") -> Floats:
    """2**x for x of at most 0, before it is rounded to `dtype`; +0 from -126.5 down, exact for whole numbers.

    1. ``x = max(x, -127)``, NaN stays
    2. ``k = x + EXP2_SHIFT``, ``r = x - (k - EXP2_SHIFT)``, exactly
    3. ``y = EXP2_TERMS[dtype]`` in r by Horner's rule in fma
    4. ``y * e``, e the float whose bits are those of k shifted left by 23
    """
    r, e = _parts(np.asarray(x, np.float32))
    return np.asarray(_horner(EXP2_TERMS[dtype], r) * e, np.float32)


def _parts(x: Floats) -> tuple[Floats, Floats]:
    """Steps 1 and 2 of `exp2`: r, and e of step 4."""
    x = np.where(x < EXP2_LEAST, EXP2_LEAST, x)
    k: Floats = x + EXP2_SHIFT
    return x - (k - EXP2_SHIFT), (k.view(np.uint32) << np.uint32(23)).view(np.float32)


def ranges(mask: Array) -> tuple[Places, Places]:
    """(start, stop) of each query of a mask [..., tq, tk]: the first key that it sees, and the one behind the last.

    A key is hidden by False, or by -inf or the least number of a floating mask's dtype. A query that sees no key has an
    empty range.
    """
    keys = mask.shape[-1]
    if keys == 0:
        return np.zeros(mask.shape[:-1], np.int64), np.zeros(mask.shape[:-1], np.int64)
    seen = mask if mask.dtype == bool else ~(mask <= finfo(mask.dtype).min)
    some = seen.any(-1)
    start, stop = seen.argmax(-1), keys - seen[..., ::-1].argmax(-1)
    return np.where(some, start, 0), np.where(some, stop, 0)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    arithmetic: str = "fma",
    scale: float | None = None,
    mask: Array | None = None,
    causal_offset: int | None = None,
    start: Array | None = None,
    stop: Array | None = None,
    out_dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Floats, Floats]:
    """(y, m, l) of the module's definition.

    Parameters
    ----------
    q : array [b, hq, tq, d]
    k : array [b, hkv, tk, d]
    v : array [b, hkv, tk, dv]
        All float32, bfloat16 or float16. Query head h reads key and value head ``h // (hq / hkv)``.
    arithmetic : str
        That of products, as in a contract.
    scale : float, optional
    mask : array that broadcasts to [b, hq, tq, tk], optional
        bool, where False hides a key; or floating point, which is added to the scaled products.
    causal_offset : int, optional
        Key j is hidden from query i where ``j > i + causal_offset``.
    start, stop : array of integers, [b] or one that broadcasts to [b, hq, tq], optional
        Keys outside are not read, by default none.
    out_dtype : dtype, optional
        Default: that of q.

    Returns
    -------
    y : array [b, hq, tq, dv]
    m, l : arrays [b, hq, tq] of float32
        What the gradient needs: the last maximum, whose zeros are +0, and the sum.
    """
    (b, hq, tq, _), (hkv, tk, dv) = q.shape, (*k.shape[1:3], v.shape[3])
    y = np.empty((b, hq, tq, dv), q.dtype if out_dtype is None else np.dtype(out_dtype))
    m, total = np.empty((2, b, hq, tq), np.float32)
    seen = None if mask is None else np.broadcast_to(mask, (b, hq, tq, tk))
    first, last = _of_queries(start, 0, (b, hq, tq)), _of_queries(stop, tk, (b, hq, tq))
    for i, h in np.ndindex(b, hq):
        for rows in _sharing(first[i, h], last[i, h]):
            keys = range(int(first[i, h, rows.start]), int(last[i, h, rows.start]))
            y[i, h, rows], m[i, h, rows], total[i, h, rows] = _head(
                q[i, h, rows], k[i, h // (hq // hkv)], v[i, h // (hq // hkv)], factor(scale, q.shape[3]), arithmetic,
                None if seen is None else seen[i, h, rows],
                None if causal_offset is None else causal_offset + rows.start, keys, y.dtype,
            )  # fmt: skip
    return y, m, total


def _of_queries(bound: Array | None, otherwise: int, shape: tuple[int, ...]) -> Places:
    """`start` or `stop` of each query."""
    found = np.asarray(otherwise if bound is None else bound, np.int64)
    return np.broadcast_to(found.reshape(-1, 1, 1) if found.ndim == 1 else found, shape)


def _sharing(first: Places, last: Places) -> list[slice]:
    """Runs of queries with one range."""
    ends = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 0)) + 1
    return [slice(a, b) for a, b in itertools.pairwise([0, *ends.tolist(), len(first)]) if a < b]


@_pinned
def _head(
    q: Array, k: Array, v: Array, c: np.float32, arithmetic: str, mask: Array | None, offset: int | None, keys: range,
    out_dtype: np.dtype[Any],
) -> tuple[Array, Floats, Floats]:  # fmt: skip
    """One head of one batch entry: steps 4 and 5, leaf by leaf."""
    o, m = np.zeros((len(q), v.shape[1] + 1), f32), np.full(len(q), -np.inf, f32)
    for first in range(keys.start, keys.stop, LEAF):  # order-critical: ascending, counted from the first key
        leaf = np.s_[first : min(first + LEAF, keys.stop)]
        t = _logits(q, k[leaf], c, arithmetic, None if mask is None else mask[:, leaf], offset, first)
        o_n, m_n = _leaf(t, v[leaf], arithmetic)
        largest = np.maximum(m, m_n)
        u = _finite(largest)
        a, b = exp2(m - u), np.where(m_n == -np.inf, f32(-0.0), exp2(m_n - u))
        o, m = _fma(o_n, b[:, None], o * a[:, None]), largest
    total = o[:, -1:]  # l, the sum of p
    y = np.where(total == 0, f32(0), _fma(o[:, :-1], f32(1) / total, f32(0)))
    return canonical(y.astype(out_dtype)), canonical(m + f32(0)), canonical(total[:, 0])


def _logits(
    q: Array, k: Array, c: np.float32, arithmetic: str, mask: Array | None, offset: int | None, first: int
) -> Floats:
    """Step 1 for the keys of a leaf that begins at key `first`."""
    t = evaluate(q, k.T, f"{arithmetic}/chain") * c
    if mask is not None and mask.dtype != bool:
        t = t + mask.astype(np.float32) * LOG2E
    hidden = np.zeros(t.shape, bool) if mask is None or mask.dtype != bool else ~mask
    if offset is not None:
        query, key = np.indices(t.shape)
        hidden = hidden | (first + key > query + offset)
    return np.where(hidden, f32(-np.inf), t)


def _leaf(t: Floats, v: Array, arithmetic: str) -> tuple[Floats, Floats]:
    """Steps 2 and 3: ([o_n | l_n], m_n)."""
    m = np.ceil(np.max(np.where(np.isnan(t), f32(-np.inf), t), axis=1))
    p = exp2(t - _finite(m)[:, None], v.dtype.name).astype(v.dtype)
    ones = np.ones((len(v), 1), v.dtype)
    return evaluate(p, np.concatenate([v, ones], axis=1), f"{arithmetic}/chain"), m


def _finite(m: Floats) -> Floats:
    """What is subtracted: the maximum, or 0 where there is none."""
    return np.where(m == -np.inf, f32(0), m)


@_pinned
def gradient_steps(
    s: Floats, m: Floats, total: Floats, *, c: float, dtype: npt.DTypeLike, hidden: Array | None = None,
    added: Array | None = None, dp: Floats | None = None, delta: Floats | None = None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """(p, ds) of the gradients: ``p = exp2(t - u) * r`` and ``ds = p * (dp - delta)``, each rounded once to `dtype`.

    t is ``s * c``, plus `added`, -inf where `hidden`; u is m, or 0 where that is -inf; r is 1 / total, or 0 where that
    is 0. exp2 is that of float32 with products and sums rounded one by one.

    Parameters
    ----------
    s, dp : array [n, rows, keys] of float32
    m, total, delta : array [n, rows] of float32
    hidden, added : arrays that broadcast to s
    """
    t: Floats = s * f32(c)
    if added is not None:
        t = t + added
    if hidden is not None:
        t = np.where(hidden, f32(-np.inf), t)
    r, e = _parts(t - _finite(m)[..., None])
    first, *rest = EXP2_TERMS["float32"]
    y = np.full_like(r, first)
    for term in rest:
        y = y * r + term
    p = y * e * np.where(total == 0, f32(0), f32(1) / total)[..., None]
    ds = None if dp is None or delta is None else canonical(((dp - delta[..., None]) * p).astype(np.dtype(dtype)))
    return canonical(p.astype(np.dtype(dtype))), ds
