"""Who shares memory with whom, decided exactly or counted as shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from ..errors import AliasError

Array = NDArray[Any]

_MAX_WORK = 100_000  # of NumPy's exact overlap search, which is exponential in the worst case
_MAX_ENUMERATED = 2**22


def same_elements(x: Array, y: Array) -> bool:
    """Whether two arrays are the same elements at the same places."""
    return bool(x.shape == y.shape and x.strides == y.strides and x.dtype == y.dtype and x.ctypes.data == y.ctypes.data)


def share_memory(x: Array, y: Array) -> bool:
    """Whether two arrays share a byte; what cannot be decided in bounded work counts as shared."""
    if not np.may_share_memory(x, y):
        return False
    try:
        return bool(np.shares_memory(x, y, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def check_apart(name: str, x: Array, out: Array, *, out_name: str = "out") -> None:
    """Raise `AliasError` when `out` shares memory with `x`."""
    if share_memory(x, out):
        raise AliasError(
            f"{out_name} and {name}", limit="no shared memory", value="they overlap", nearest="memory of its own"
        )


def overlaps_itself(x: Array) -> bool:
    """Whether two elements of an array lie at one address; what is too large to enumerate counts as overlapping."""
    if x.flags.forc or not x.size:
        return False
    extent = x.itemsize
    pairs = sorted((abs(s), d) for s, d in zip(x.strides, x.shape, strict=True) if d > 1)
    for stride, size in pairs:
        if stride < extent:
            break
        extent += (size - 1) * stride
    else:
        return False  # each dimension steps over all that the smaller ones span
    if pairs[0][0] == 0 or x.size > _MAX_ENUMERATED:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, size in pairs:
        offsets = (offsets[:, None] + stride * np.arange(size)).ravel()
    offsets.sort()
    return bool((np.diff(offsets) < x.itemsize).any())


def check_no_self_overlap(name: str, out: Array) -> None:
    """Raise `AliasError` when two elements of `out` lie at one address."""
    if overlaps_itself(out):
        raise AliasError(
            f"strides of {name}",
            limit="no two elements at one address",
            value=f"shape {list(out.shape)}, strides {list(out.strides)} bytes",
            nearest=f"the strides of np.empty({list(out.shape)})",
        )


def check_items_apart(outs: Sequence[Array], reads: Sequence[tuple[str, int, Array]], *, out_name: str = "out") -> None:
    """Raise `AliasError` when an item's output shares memory with another's, or with anything that is read.

    A c may be its own item's output: the same elements at the same places. One sweep over the sorted address ranges, so
    that disjoint items cost n log n and not n squared.
    """
    spans = [(*byte_bounds(x), out_name, i, x) for i, x in enumerate(outs) if x.size]
    spans += [(*byte_bounds(x), name, i, x) for name, i, x in reads if x.size]
    spans.sort(key=lambda span: span[0])
    live: list[tuple[int, int, str, int, Array]] = []
    for span in spans:
        low, _, name, i, x = span
        live = [other for other in live if other[1] > low]
        for _, _, other_name, j, y in live:
            if out_name not in (name, other_name):
                continue
            if i == j and {name, other_name} == {out_name, "c"} and same_elements(x, y):
                continue
            check_apart(f"{name}[{i}]", x, y, out_name=f"{other_name}[{j}]")
        live.append(span)
