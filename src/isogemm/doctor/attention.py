"""`diagnose_attention`: softmax(scale * q @ k.T + mask) @ v, and what goes wrong around its two products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from ..base import arguments
from ..errors import OptionError, ShapeError
from ..operands.tensors import on_host
from .bank import MISTAKES
from .case import Array, check_floats
from .diagnosis import Cause, Diagnosis

MENDS = {
    "softmax-scale": "multiply scores by 1 / sqrt(head dimension), once, before the softmax",
    "mask-transposed": "rows of a mask are queries, columns are keys; True takes part",
    "gqa-mapping": MISTAKES["gqa-mapping"].mend,
}
ROUNDED = 2.0**-10  # of the largest value: scores pass through 16 bits in many kernels


@dataclass(frozen=True)
class _Call:
    q: Array
    k: Array
    v: Array
    mask: Array | None
    scale: float
    heads: tuple[int, ...]

    def result(self) -> Array:
        """The result in float64, [heads, queries, dimension]."""
        k, v = self.k[list(self.heads)], self.v[list(self.heads)]
        scores = self.scale * (self.q @ k.swapaxes(1, 2))
        if self.mask is not None:
            scores = np.where(self.mask, scores, -np.inf) if self.mask.dtype == bool else scores + self.mask
        with np.errstate(all="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
            return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def diagnose_attention(
    observed: Any, q: Any, k: Any, v: Any, *, mask: Any = None, scale: float | None = None, causal: bool = False
) -> Diagnosis:
    """Name the mistake that made a result of ``softmax(scale * q @ k.T + mask) @ v``.

    Parameters
    ----------
    observed : array [heads, queries, dimension]
    q : array [heads, queries, dimension]
    k, v : array [kv_heads, keys, dimension]
        Each serves ``heads / kv_heads`` neighbouring query heads.
    mask : array [queries, keys], optional
        Of bool (True takes part), or of floats that are added; one for each head where it has three dimensions.
    scale : float, optional
        By default ``1 / sqrt(dimension)``.
    causal : bool
        A query sees no later key; the last query sees all.

    Returns
    -------
    Diagnosis
        A query that sees no key is right with zeros and with NaN: libraries give either.

    Raises
    ------
    ShapeError, DTypeError
        Shapes do not fit, or elements are no floats.
    OptionError
        A scale that is not positive.
    """
    out, x, y, z = (
        check_floats(name, on_host(t)) for name, t in (("observed", observed), ("q", q), ("k", k), ("v", v))
    )
    _check_shapes(out, x, y, z)
    x, y, z = (t.astype(np.float64) for t in (x, y, z))
    allowed = None if mask is None else _mask(on_host(mask), (*x.shape[:2], y.shape[1]))
    if arguments.flag("causal", causal):
        lower = np.tri(x.shape[1], y.shape[1], y.shape[1] - x.shape[1], dtype=bool)
        allowed = lower if allowed is None else _both(allowed, lower)
    group = len(x) // len(y)
    call = _Call(x, y, z, allowed, _scale(scale, x.shape[2]), tuple(h // group for h in range(len(x))))
    seen, eps = out.astype(np.float64), float(ml_dtypes.finfo(out.dtype).eps)
    unit = (eps + ROUNDED * (out.dtype.itemsize == 2) + 2.0**-18) * np.abs(z).max(initial=0)
    off = _off(seen, call.result(), unit)
    right = float(off.max(initial=0))
    if right <= 1:
        return Diagnosis("right", elements=seen.size, residual=right)
    found = [
        (name, words, float(_off(seen, other.result(), unit).max(initial=0))) for name, words, other in _mistakes(call)
    ]
    good = sorted((x for x in found if x[2] <= 1), key=lambda x: x[2])
    names = tuple(dict.fromkeys(name for name, _, _ in good))
    causes = tuple(
        Cause(name, words, off, 1.0, MENDS[name], tuple(other for other in names if other != name))
        for name, words, off in good
    )
    return Diagnosis("wrong", causes, elements=seen.size, wrong=int((off > 1).sum()), residual=right)


def _check_shapes(out: Array, q: Array, k: Array, v: Array) -> None:
    """Raise ShapeError: operands do not fit each other, or the result does not fit them."""
    three = all(t.ndim == 3 for t in (q, k, v))
    if not three or k.shape[:2] != v.shape[:2] or not len(k) or len(q) % len(k) or q.shape[2] != k.shape[2]:
        limit = "q [heads, queries, d], k and v [kv_heads, keys, d], heads a multiple of kv_heads"
        nearest = "one sequence of a batch, as q[0], k[0], v[0]" if q.ndim == 4 else "k and v with the heads and d of q"
        raise ShapeError("attention", limit=limit, value=[list(t.shape) for t in (q, k, v)], nearest=nearest)
    if not q.shape[2]:
        raise ShapeError("d of q and k", limit="at least 1", value=0, nearest=1)
    wanted = [*q.shape[:2], v.shape[2]]
    if list(out.shape) != wanted:
        raise ShapeError("shape of observed", limit="[heads, queries, d of v]", value=list(out.shape), nearest=wanted)


def _mask(mask: Array, shape: tuple[int, ...]) -> Array:
    """A mask for each head. Raises DTypeError or ShapeError: it is none of these scores'."""
    if mask.dtype != bool:
        check_floats("mask", mask, "bool, which takes part where it is True, or floats, which are added", "bool")
    batch = mask.shape[:-3]
    try:  # a batch of one sequence is that sequence
        return np.broadcast_to(mask.reshape(mask.shape[-3:]) if batch == (1,) * len(batch) else mask, shape)
    except ValueError as error:
        limit = f"one that broadcasts to {list(shape)}"
        raise ShapeError("shape of mask", limit=limit, value=list(mask.shape), nearest=list(shape[1:])) from error


def _scale(scale: float | None, d: int) -> float:
    """The factor of the scores. Raises OptionError: it is not positive."""
    found = d**-0.5 if scale is None else arguments.number("scale", scale)
    if not 0 < found < np.inf:
        raise OptionError("scale", limit="a positive number", value=scale, nearest="None, for 1 / sqrt(d)")
    return found


def _both(mask: Array, lower: Array) -> Array:
    """A mask of either kind, and nothing later."""
    return mask & lower if mask.dtype == bool else np.where(lower, mask, -np.inf)


def _off(seen: Array, found: Array, unit: float) -> Array:
    """How far each element is off, in units; one without a number beside one with is infinitely far."""
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.nan_to_num(np.abs(seen - found) / unit, nan=np.inf)
    alike = (seen == found) | (np.isnan(found) & (np.isnan(seen) | (seen == 0)))  # 0 of a query that sees no key
    return np.where(alike, 0, off)


def _mistakes(call: _Call) -> Iterator[tuple[str, str, _Call]]:
    d, heads, kv = call.q.shape[2], len(call.q), len(call.k)
    for words, scale in (("forgotten", 1.0), ("1 / d", 1 / d), ("sqrt(d)", d**0.5), ("applied twice", call.scale**2)):
        if scale != call.scale:
            yield "softmax-scale", f"scale {words}: {scale:.6g}, not {call.scale:.6g}", replace(call, scale=scale)
    if call.mask is not None:
        if call.mask.shape[-1] == call.mask.shape[-2]:
            yield "mask-transposed", "rows of the mask taken for keys", replace(call, mask=call.mask.swapaxes(-1, -2))
        if call.mask.dtype == bool:
            yield "mask-transposed", "True taken for masked", replace(call, mask=~call.mask)
        yield "mask-transposed", "the mask left out", replace(call, mask=None)
    for words, which in (("h % kv_heads", [h % kv for h in range(heads)]), ("0", [0] * heads)):
        if tuple(which) != call.heads:
            yield "gqa-mapping", f"query head h reads key-value head {words}", replace(call, heads=tuple(which))
