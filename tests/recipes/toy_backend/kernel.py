"""``fma/chain`` by whole numbers: a float32 is n * 2**-149, so a product is n * 2**-298, and a sum of them exact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["chain"]


def _fma(total: float, x: float, y: float) -> float:
    """total + x * y, rounded once to float32, to even."""
    if not math.isfinite(total + x * y):
        return total + x * y
    exact = (_whole(total) << 149) + _whole(x) * _whole(y)
    if not exact:
        return total + x * y  # which has the sign of a zero
    shift = max(exact.bit_length() - 24, 149)
    kept, rest = divmod(abs(exact), 1 << shift)
    half = 1 << (shift - 1)
    rounded = kept + (rest > half or (rest == half and kept % 2 == 1))
    value = math.ldexp(rounded, shift - 298)
    return math.copysign(value if value < 2.0**128 else math.inf, exact)


def _whole(x: float) -> int:
    return int(math.ldexp(x, 149))


_fma_of_arrays = np.frompyfunc(_fma, 3, 1)


def chain(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """start [m, n] + a [m, k] @ b [k, n], ascending in k."""
    total, x, y = (each.astype(np.float32).astype(object) for each in (start, a, b))
    for k in range(x.shape[1]):
        total = _fma_of_arrays(total, x[:, k, None], y[None, k, :])
    return total.astype(np.float32)
