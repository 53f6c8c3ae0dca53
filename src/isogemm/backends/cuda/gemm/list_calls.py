"""The short path for lists of torch CUDA tensors: pointer arrays and groups of a kind seen before.

As `calls`, with one key for the whole list. Validating and describing a group of 64 products costs milliseconds the
long way, several times what the device needs for a layer of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....base.seen import Seen
from ....operands.tensors import KINDS, is_traced, ready
from ....problem.product import Addresses, Product
from .. import calls
from ..pointers import PointerArray

Counts = NDArray[np.int64]
_entries: Seen[SeenList] = Seen(512)


class SeenList(NamedTuple):
    """The products of a list, and what its results are made of."""

    products: tuple[Product, ...]
    run: Any  # (items, device, stream) -> None
    device: int
    like: dict[str, Any]
    places: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]  # shape, strides and first element of each result
    elements: int
    spans: Counts  # [2 or 3, items] bytes of a, b and out
    accumulate: bool


def call(form: str, a: Any, b: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> list[Any] | None:
    """The products of lists like those of a call before; None where the long way has to look. See `calls.call`."""
    groups = (a, b) if out is None else (a, b, out)
    try:
        looked = _look(groups, bias)
        entry = None if looked is None else _entries.get((form, options, looked[0]))
    except (RuntimeError, TypeError):
        return None
    if looked is None or entry is None or type(options[0]) is not bool:
        return None
    _, where, at_bias = looked
    if out is None:
        try:
            flat = calls._empty_strided((entry.elements,), (1,), **entry.like)
        except RuntimeError:  # no memory: the long way says so in our words
            return None
        base, item = flat.data_ptr(), flat.element_size()
        if base & 127:
            return None
        results = [flat.as_strided(*place) for place in entry.places]
        where.append([base + first * item for _, _, first in entry.places])
    else:
        if not _apart(np.array(where, np.int64), entry.spans, at_bias, bias):
            return None
        results = out
    c = where[2] if entry.accumulate else [0] * len(where[2])
    items = [
        (product, Addresses(x, y, z, start, at_bias))
        for product, x, y, z, start in zip(entry.products, *where, c, strict=True)
    ]
    entry.run(items, entry.device, calls._raw_stream(entry.device))
    return results


def _look(groups: tuple[Any, ...], bias: Any) -> tuple[tuple[Any, ...], list[Sequence[int]], int] | None:
    """(key, addresses of each group, of the bias), or None where no key can stand for these operands."""
    if not KINDS or is_traced():
        return None
    graded = calls._grad_enabled()
    key: list[Any] = []
    where: list[Sequence[int]] = []
    common = 128
    for group in (*groups, () if bias is None else (bias,)):
        if type(group) is PointerArray:  # looked at when it was made
            key.append(group.facts)
            where.append(group.addresses)
            common |= group.common
            continue
        if not isinstance(group, list | tuple):
            return None
        addresses = []
        for x in group:
            if type(x) not in KINDS or x.is_neg() or (graded and x.requires_grad):
                return None
            address = x.data_ptr()
            if not address:
                return None
            common |= address
            addresses.append(address)
            key += (x.shape, x.stride(), x.dtype, x.get_device())
        key.append(len(addresses))
        where.append(addresses)
    at_bias = where.pop()
    return (*key, common & -common), where, at_bias[0] if at_bias else 0


def _apart(where: Counts, spans: Counts, at_bias: int, bias: Any) -> bool:
    """Whether every output keeps clear of all that is read and of the others; False where one interval meets another.

    The bounds of the memory alone: intervals that meet may still hold different elements, which the long way decides.
    """
    starts, stops = where, where + spans
    order = np.argsort(starts[2])
    low, high = starts[2][order], stops[2][order]
    if (high[:-1] > low[1:]).any():
        return False
    begins, ends = starts[:2].ravel(), stops[:2].ravel()
    if bias is not None:
        begins, ends = np.append(begins, at_bias), np.append(ends, at_bias + calls.span(bias))
    # The last output that begins before a read ends is the only one that can meet it, and the outputs are apart.
    last = np.searchsorted(low, ends, side="left") - 1
    return not ((last >= 0) & (high[last] > begins)).any()


def remember(form: str, operands: tuple[Any, ...], options: tuple[Any, ...], results: Any, device: Any) -> None:
    """Enter a call that took the long way, if all its items went to the device together; as `calls.remember`."""
    a, b, bias, out = operands
    if len(device.trace) != 1 or device.trace[0][0] is None or not ready():
        return
    run, items, _ = device.trace[0]
    if not isinstance(items, list) or len(items) != len(results):
        return
    looked = _look((a, b) if out is None else (a, b, out), bias)
    made = _look((results,), None)
    if looked is None or made is None:
        return
    key, where, at_bias = looked
    where = where if out is not None else [*where, made[1][0]]
    if any(at[:3] != expected for (_, at), expected in zip(items, zip(*where, strict=True), strict=True)):
        return
    if any(at.c not in (0, at.out) or at.bias != at_bias for _, at in items):
        return
    _enter((form, options, key), items, run, device.place.ordinal, (a, b, results), where, fresh=out is None)


def _enter(
    key: tuple[Any, ...],
    items: Sequence[tuple[Product, Addresses]],
    run: Any,
    device: int,
    groups: tuple[Any, Any, Any],
    where: list[Sequence[int]],
    *,
    fresh: bool,
) -> None:
    results, align = groups[2], key[2][-1]
    like, places = {}, []
    if fresh:  # views of one new buffer, whose places in it have an alignment of their own
        item, first = results[0].element_size(), min(where[2])
        like = {"dtype": results[0].dtype, "device": results[0].device}
        for x, address in zip(results, where[2], strict=True):
            places.append((tuple(x.shape), x.stride(), (address - first) // item))
            align |= address - first
        align &= -align
    seen = SeenList(
        tuple(replace(product, align=align) for product, _ in items),
        run,
        device,
        like,
        tuple(places),
        sum(math.prod(shape) for shape, _, _ in places),
        np.array([_spans(group) for group in groups], np.int64),
        items[0][0].accumulate,
    )
    _entries.keep(key, seen)


def _spans(group: Any) -> list[int]:
    return [group.span] * len(group) if type(group) is PointerArray else [calls.span(x) for x in group]
