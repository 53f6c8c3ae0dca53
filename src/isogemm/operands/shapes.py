"""Views of the same memory with other dimensions: what lets one product do the work of many, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def merge(x: Array, keep: int) -> Array | None:
    """`x` with all but its last `keep` dimensions made one, as a view; None where that takes a copy."""
    lead = x.ndim - keep
    pairs = [(d, s) for d, s in zip(x.shape[:lead], x.strides[:lead], strict=True) if d != 1]
    for (_, outer), (size, inner) in pairwise(pairs):
        if outer != size * inner:
            return None
    return x.reshape(-1, *x.shape[lead:]) if x.size else None


def merged_rows(x: Array, out: Array) -> tuple[Array, Array] | None:
    """x [..., k] and out [..., n] as two matrices; None where no one row stride walks each."""
    rows, into = (x[None, :], out[None, :]) if x.ndim == 1 else (x, out)
    if rows.ndim == 2:
        return rows, into
    merged, target = merge(rows, 1), merge(into, 1)
    return None if merged is None or target is None else (merged, target)


def matrices(x: Array, out: Array) -> Iterator[tuple[Array, Array]]:
    """x [..., k] and out [..., n] as matrices: one pair where one row stride walks each, else several."""
    merged = merged_rows(x, out)
    if merged is not None:
        yield merged
    else:
        for i in np.ndindex(x.shape[:-2]):
            yield x[i], out[i]
