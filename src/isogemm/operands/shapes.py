"""How arrays lie, and views of the same memory with other dimensions: one product then does the work of many."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_may_share = np.may_share_memory  # bounds alone; the exact look is taken where they meet


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


def are_rows(x: Any, k: int) -> bool:
    """Whether an array of more axes than a matrix, or of one, is rows of k that lie side by side, as a matrix has."""
    return x.ndim not in (0, 2) and x.shape[-1] == k and x.size > 0 and x.flags.c_contiguous


def are_stacks(a: Any, b: Any) -> bool:
    """Whether arrays of as many axes are stacks of as many matrices, which lie one behind another."""
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        return False
    return bool(a.size and b.size and a.flags.c_contiguous and b.flags.c_contiguous)


def fits(out: Any, dtype: Any, shape: tuple[int, ...], *operands: Any) -> bool:
    """Whether a result can go there without a further look."""
    return (
        out.dtype is dtype
        and out.shape == shape
        and out.flags.carray
        and not any(_may_share(out, operand) for operand in operands)
    )
