"""Mistakes about where elements lie: order, transposition, leading dimensions, strides and offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..case import GemmCall, StoredMatrix, Variant

PADDINGS = (4, 8, 16, 32, 64, 128)


def _transposed_in_place(x: StoredMatrix) -> StoredMatrix:
    """Lines of the buffer taken for columns: the same extents, the other order, no padding."""
    return replace(x, row=1, column=x.rows) if x.by_rows else replace(x, row=x.columns, column=1)


def order(case: GemmCall) -> Iterator[Variant]:
    """A buffer of one order read or written as one of the other."""
    names = {"a": "A", "b": "B", "c": "C"}
    for chosen in (("a",), ("b",), ("c",), ("a", "b"), ("a", "b", "c")):
        mistaken = case
        for name in chosen:
            mistaken = mistaken.read(name, _transposed_in_place(getattr(case, name)))
        words = " and ".join(names[name] for name in chosen)
        yield Variant(f"{words} taken for the other order", mistaken)


def _transposition(name: str, case: GemmCall) -> Iterator[Variant]:
    x: StoredMatrix = getattr(case, name)
    yield Variant(
        f"op({name.upper()}) has its other letter, with the same ld",
        case.read(name, replace(x, row=x.column, column=x.row)),
    )
    lines = x.rows if x.by_rows else x.columns
    if lines != x.ld:
        other = replace(x, row=1, column=lines) if x.by_rows else replace(x, row=lines, column=1)
        yield Variant(f"op({name.upper()}) has its other letter, and ld {lines}", case.read(name, other))


trans_a, trans_b = partial(_transposition, "a"), partial(_transposition, "b")


def _leading(name: str, case: GemmCall) -> Iterator[Variant]:
    x: StoredMatrix = getattr(case, name)
    if name == "b" and case.weights:
        return  # rows of blocks have a stride of their own
    m, n, k = case.sizes
    line = x.columns if x.by_rows else x.rows
    padded = {-(-line // p) * p for p in PADDINGS} | {line + p for p in (1, *PADDINGS)}
    around = {x.ld - 1, x.ld + 1, x.ld + 8, 2 * x.ld}
    steps = {abs(x.step or 0)}
    for ld in sorted(({line, x.rows, x.columns, m, n, k} | padded | around | steps) - {x.ld, 0}):
        if ld > 0 and ld != 1:
            yield Variant(f"ld{name} is {ld}, the data say {x.ld}", case.read(name, x.with_ld(ld)))


lda, ldb, ldc = (partial(_leading, name) for name in "abc")


def _stride(name: str, case: GemmCall) -> Iterator[Variant]:
    x: StoredMatrix = getattr(case, name)
    if case.items < 2 or x.step is None:
        return
    m, n, k = case.sizes
    lines = x.rows if x.by_rows else x.columns
    steps = {x.ld * d for d in (m, n, k, lines, lines - 1, lines + 1)} | {m * k, k * n, m * n, x.rows * x.columns, 0}
    for step in sorted(steps - {x.step}):
        yield Variant(f"stride_{name} is {step}, the data say {x.step}", case.read(name, x.with_step(step)))


stride_a, stride_b, stride_c = (partial(_stride, name) for name in "abc")


def offsets(case: GemmCall) -> Iterator[Variant]:
    """Each matrix begins somewhere else."""
    for name in "abc":
        x: StoredMatrix = getattr(case, name)
        first, step, last = x.offsets[0], x.step, x.offsets[-1]
        moved = {
            "counted in bytes": tuple(o // x.flat.itemsize for o in x.offsets),
            "counted in elements where bytes were meant": tuple(o * x.flat.itemsize for o in x.offsets),
            "one element late": tuple(o + 1 for o in x.offsets),
            "one element early": tuple(o - 1 for o in x.offsets),
            "one line late": tuple(o + x.ld for o in x.offsets),
            "left out": tuple(o - first for o in x.offsets),
        }
        for bits in (16, 32):
            half = 1 << (bits - 1)
            moved[f"wrapped in {bits} bits"] = tuple((o + half) % (2 * half) - half for o in x.offsets)
            moved[f"wrapped in {bits} bits without a sign"] = tuple(o % (2 * half) for o in x.offsets)
        if case.items > 1:
            moved["one item late"] = (*x.offsets[1:], last + (step or 0))
            moved["one item early"] = (first - (step or 0), *x.offsets[:-1])
            moved["in reverse"] = x.offsets[::-1]
            for p in range(1, min(4, case.items)):
                moved[f"in turns, from item {p} on"] = x.offsets[p:] + x.offsets[:p]
            for p in range(case.items - 1 if case.items <= 8 else 0):
                swapped = (*x.offsets[:p], x.offsets[p + 1], x.offsets[p], *x.offsets[p + 2 :])
                moved[f"of items {p} and {p + 1} exchanged"] = swapped
        seen = {x.offsets}
        for words, there in moved.items():
            if there not in seen:
                seen.add(there)
                yield Variant(f"offsets of {name.upper()} {words}", case.read(name, replace(x, offsets=there)))
