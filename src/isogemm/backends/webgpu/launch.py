"""Launches of a kernel for a product of any size: strides as parameters, and pieces that fit what a kernel may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import name_of
from ...errors import LimitError, ShapeError
from .adapter import ALIGN, Adapter, DeviceBuffer
from .array import buffer_of, offset_of, span
from .kernels import kernel_of
from .planes import WHOLE

Array = NDArray[Any]
A, B, OUT, EXTRA = 1, 2, 3, 4  # bindings of products


class KernelCall(NamedTuple):
    """One launch: out = a @ b, from what out holds where `start`.

    Rows of quantized blocks are a `b` of pairs of bytes [row bytes / 2, n]; integers come with the scales of `a`.
    """

    a: Array
    b: Array
    out: Array
    start: bool = False
    scales: Array | None = None


def run(adapter: Adapter, name: str, code: str, walk: KernelCall) -> None:
    """A kernel's code on a product, as many launches as its operands need."""
    kernel = kernel_of(name)
    columns = kernel.columns_of(name_of(walk.b.dtype))
    _check_vectors(name, kernel.words, walk)
    each = max(1, 4 * kernel.words // walk.a.itemsize)
    pieces = list(_pieces(adapter, kernel.order == "chain", (kernel.rows, columns), each, walk))  # all, or none runs
    for a, b, out, start, scales in pieces:
        places = [bound(x) for x in (a, b, out)]
        bindings = dict(zip((A, B, OUT), places, strict=True)) | ({} if scales is None else {EXTRA: bound(scales)})
        numbers = [*out.shape, a.shape[1], int(start)]
        for x, (_, first, _) in zip((a, b, out), places, strict=True):
            numbers += placed(x, first)
        grid = -(-out.shape[1] // columns), -(-out.shape[0] // kernel.rows)
        adapter.launch(code, [*numbers, 0], bindings, grid)


def whole(a: Array, b: Array, nbytes: int = WHOLE) -> bool:
    """Whether operands of one type lie at whole vectors: along K, or where b's columns are neighbours, along N."""
    each = nbytes // a.itemsize
    if not a.size:
        return False
    for x in (a, b if across(b) else b.T):
        places = x.shape[1], x.strides[0] // x.itemsize, offset_of(x) // x.itemsize
        if x.strides[1] != x.itemsize or any(place % each for place in places):
            return False
    return True


def divides(adapter: Adapter, b: Array, out: Array) -> bool:
    """Whether no piece of operands at whole vectors, b along N among them, has to be smaller than a vector."""
    most = 2 * WHOLE // b.itemsize  # twice a vector: what shrinks less is cut first
    steps_of = (x.strides[axis] * min(most, x.shape[axis]) for x, axis in ((b, 0), (out, 1)))
    return not across(b) or all(abs(nbytes) <= adapter.limits.binding - ALIGN for nbytes in steps_of)


def across(b: Array) -> bool:
    """Whether neighbouring columns are neighbours in memory."""
    return abs(b.strides[1]) < abs(b.strides[0])


def _check_vectors(name: str, words: int, walk: KernelCall) -> None:
    """Raise `ShapeError` unless operands lie at whole vectors, where the kernel takes those."""
    if words and walk.out.size and not whole(walk.a, walk.b, 4 * words):
        raise ShapeError(
            f"operands of {name}", value=[(x.shape, x.strides) for x in (walk.a, walk.b)],
            limit=f"extents, strides and offsets in multiples of {4 * words // walk.a.itemsize}, side by side",
            nearest="a kernel for any strides",
        )  # fmt: skip


def placed(x: Array, first: int) -> list[int]:
    """A view as parameters: elements from byte `first` of its buffer to its own first one, and strides in elements."""
    return [(offset_of(x) - first) // x.itemsize, *(stride // x.itemsize for stride in x.strides)]


def bound(x: Array) -> tuple[DeviceBuffer, int, int]:
    """The range of a buffer that a view's elements are in, as a kernel may see it: (buffer, first byte, bytes)."""
    buffer, (start, stop) = buffer_of(x), span(x)
    first = start // ALIGN * ALIGN
    return buffer, first, max(4, -(-(stop - first) // 4) * 4)


def _pieces(adapter: Adapter, chain: bool, tile: tuple[int, int], each: int, walk: KernelCall) -> Iterator[KernelCall]:
    """Products whose operands fit the adapter's limits: of some rows or columns, and for chains of parts of K.

    `each`: elements of a vector, within which nothing is cut.
    """
    a, b, out, start, scales = walk
    limits = adapter.limits
    cut = ""
    if bytes_of(b) > limits.binding:
        cut = "n" if shrinks(b, b[:, : b.shape[1] // 2]) else "k"
    elif bytes_of(a) > limits.binding:
        cut = "m" if shrinks(a, a[: a.shape[0] // 2]) else "k"
    elif bytes_of(out) > limits.binding:
        cut = "m" if shrinks(out, out[: out.shape[0] // 2]) else "n"
    elif out.shape[0] > limits.groups * tile[0]:
        cut = "m"
    elif out.shape[1] > limits.groups * tile[1]:
        cut = "n"
    if not cut:
        yield walk
        return
    extent = {"m": out.shape[0], "n": out.shape[1], "k": a.shape[1]}[cut]
    half = extent // 2
    half -= half % (each if cut == "k" or (cut == "n" and across(b)) else 1)
    if not half or (cut == "k" and (not chain or a.shape[1] != b.shape[0])) or (cut == "m" and scales is not None):
        raise LimitError(
            f"bytes that a kernel sees at once on {adapter.name}", limit=limits.binding,
            value=max(bytes_of(x) for x in (a, b, out)), nearest="weights stored [n, k], which are cut by rows",
        )  # fmt: skip
    low, high = slice(0, half), slice(half, extent)
    if cut == "m":
        parts = [KernelCall(a[x], b, out[x], start) for x in (low, high)]
    elif cut == "n":
        parts = [KernelCall(a, b[:, x], out[:, x], start, scales) for x in (low, high)]
    else:
        parts = [KernelCall(a[:, low], b[low], out, start), KernelCall(a[:, high], b[high], out, True)]
    for part in parts:
        yield from _pieces(adapter, chain, tile, each, part)


def bytes_of(x: Array) -> int:
    """Bytes of the range that a kernel must see for a view."""
    return bound(x)[2] if x.size else 0


def shrinks(whole: Array, half: Array) -> bool:
    """Whether half of the elements lie in not much more than half of the bytes."""
    return half.size > 0 and np.subtract(*span(half)[::-1]) < 0.75 * np.subtract(*span(whole)[::-1])
