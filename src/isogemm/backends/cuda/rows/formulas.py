"""What kernels along rows compute, on arrays of float32: `isogemm.contract.rows`, and the gradients' formulas.

Every step is rounded to float32 by itself; sums have the order of `isogemm.contract.rows.lane_sum`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.floating import ieee_defaults
from ....contract import rows
from ....contract.reference import canonical

__all__ = ["chain", "elements", "reduced", "turned"]

Array = NDArray[Any]
f32 = np.float32


def _mean(row: Array) -> np.float32:
    return np.float32(rows.lane_sum(row) / f32(row.size))


def reduced(kind: str, x: Array, g: Array | None, w: Array | None, b: Array | None, eps: float, mid: Any) -> Any:
    """(result, second) of one row of an operation of `row_codes.REDUCE`; second is None where there is none.

    Parameters
    ----------
    x, g : array [n] of float32
        The operand, and the gradient of the result or the residual.
    w, b : array [n] of float32 or None
    mid : dtype
        That of the residual, to which their sum is rounded.
    """
    with ieee_defaults(), np.errstate(all="ignore"):
        if kind in ("sum", "mean", "softmax", "log_softmax"):
            return getattr(rows, "sum_row" if kind == "sum" else kind)(x), None
        if kind == "rms_norm":
            return rows.rms_norm(x, w, eps), None
        if kind == "layer_norm":
            return rows.layer_norm(x, w, b, eps), None
        assert g is not None
        if kind == "add_rms_norm":
            h = canonical((x + g).astype(mid))
            return rows.rms_norm(h.astype(np.float32), w, eps), h
        if w is not None:
            g = g * w
        if kind in ("softmax_back", "log_softmax_back"):
            p = rows.softmax(x)
            return (p * (g - rows.lane_sum(p * g)) if kind == "softmax_back" else g - p * rows.lane_sum(g)), None
        mean = _mean(x) if kind == "layer_norm_back" else f32(0)
        d = x - mean if kind == "layer_norm_back" else x
        r = f32(1) / np.sqrt(_mean(d * d) + f32(eps))
        h = d * r
        left = g - _mean(g) if kind == "layer_norm_back" else g
        return (left - h * _mean(g * h)) * r, np.array([r, mean], np.float32)


def elements(kind: str, x: Array, y: Array | None, dy: Array | None) -> tuple[Array, Array | None]:
    """(result, second) of an operation of `row_codes.EACH`."""
    with ieee_defaults(), np.errstate(all="ignore"):
        if kind == "silu_mul_back":
            assert y is not None
            assert dy is not None
            s = rows.sigmoid(x)
            return (dy * y) * (s * (f32(1) + x * (f32(1) - s))), dy * (x * s)
        if kind == "add":
            return x + y, None
        if kind == "silu_mul":
            assert y is not None
            return rows.silu_mul(x, y), None
        return getattr(rows, kind)(x), None


def turned(
    x: Array, cos: Array, sin: Array, w: Array | None, *, norm: bool, interleaved: bool, eps: float, mid: Any
) -> Array:
    """One rotated row, with `norm` after a norm that is rounded to `mid`."""
    if norm:
        x = rows.rounded(rows.rms_norm(x, w, eps), mid).astype(np.float32)
    return rows.rope(x, cos, sin, interleaved)


def chain(terms: Array, start: Array) -> Array:
    """``start + terms[0] + terms[1] + ...``, each sum rounded."""
    with ieee_defaults(), np.errstate(all="ignore"):
        total = start.astype(np.float32)
        for term in terms:
            total = total + term
        return total
