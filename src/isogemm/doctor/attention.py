"""`diagnose_attention`: softmax(scale * q @ k.T + mask) @ v, and what goes wrong around its two products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ShapeError
from ..operands.tensors import on_host
from .bank import MISTAKES
from .case import Array
from .diagnosis import Cause, Diagnosis
from .results import check_floats

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
            weights = np.exp(scores - scores.max(-1, keepdims=True))
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
        Of bool (True takes part), or of numbers that are added.
    scale : float, optional
        By default ``1 / sqrt(dimension)``.
    causal : bool
        A query sees no later key; the last query sees all.

    Returns
    -------
    Diagnosis

    Raises
    ------
    ShapeError, DTypeError
        Shapes do not fit, or the result is none of floats.
    """
    x, y, z = (on_host(t).astype(np.float64) for t in (q, k, v))
    if (
        not x.ndim == y.ndim == z.ndim == 3
        or min(y.shape) < 1
        or y.shape[:2] != z.shape[:2]
        or x.shape[0] % y.shape[0]
        or x.shape[2] != y.shape[2]
    ):
        shapes = [list(t.shape) for t in (x, y, z)]
        limit = "q [heads, queries, d], k and v [kv_heads, keys, d]"
        raise ShapeError("attention", limit=limit, value=shapes, nearest=[shapes[0]] * 3)
    out, want = on_host(observed), [*x.shape[:2], z.shape[2]]
    check_floats("observed", out)
    if list(out.shape) != want:
        raise ShapeError("observed", limit=want, value=list(out.shape), nearest=want)
    allowed = None if mask is None else _fitting(on_host(mask), (*x.shape[:2], y.shape[1]))
    if causal:
        lower = np.tri(x.shape[1], y.shape[1], y.shape[1] - x.shape[1], dtype=bool)
        allowed = lower if allowed is None else _both(allowed, lower)
    group = len(x) // len(y)
    call = _Call(
        x, y, z, allowed, x.shape[2] ** -0.5 if scale is None else scale, tuple(h // group for h in range(len(x)))
    )
    seen, eps = out.astype(np.float64), float(ml_dtypes.finfo(out.dtype).eps)
    unit = (eps + ROUNDED * (out.dtype.itemsize == 2) + 2.0**-18) * np.abs(z).max(initial=0)
    right = _off(seen, call.result(), unit)
    if right <= 1:
        return Diagnosis("right", elements=seen.size, residual=right)
    found = [(name, words, _off(seen, other.result(), unit)) for name, words, other in _mistakes(call)]
    good = sorted((x for x in found if x[2] <= 1), key=lambda x: x[2])
    names = tuple(dict.fromkeys(name for name, _, _ in good))
    causes = tuple(
        Cause(name, words, off, 1.0, MENDS[name], tuple(other for other in names if other != name))
        for name, words, off in good
    )
    wrong = int((np.abs(seen - call.result()) > unit).sum())
    return Diagnosis("wrong", causes, elements=seen.size, wrong=wrong, residual=right)


def _fitting(mask: Array, shape: tuple[int, ...]) -> Array:
    """A mask that can be broadcast to the scores [heads, queries, keys]."""
    if mask.ndim > 3 or any(x not in (1, y) for x, y in zip(mask.shape[::-1], shape[::-1], strict=False)):
        limit = f"one that broadcasts to {list(shape)}"
        raise ShapeError("shape of mask", limit=limit, value=list(mask.shape), nearest=list(shape))
    return mask


def _both(mask: Array, lower: Array) -> Array:
    """A mask of either kind, and nothing later."""
    return mask & lower if mask.dtype == bool else np.where(lower, mask, -np.inf)


def _off(seen: Array, found: Array, unit: float) -> float:
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(seen - found) / unit
    same = (seen == found) | (np.isnan(seen) & np.isnan(found))
    return float(np.where(same, 0, np.nan_to_num(off, nan=np.inf)).max(initial=0))


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
