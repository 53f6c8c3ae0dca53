"""The recipe that a person would follow, step by step, each with what it found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..operands.tensors import on_host
from .case import Array, GemmCall, StoredMatrix
from .results import call_of
from .simulate import explained, simulate

ALIGNED = 16  # bytes that vector loads and tensor cores take at a time


def recipe(observed: Any, a: Any, b: Any, c: Any = None, **call: Any) -> Iterator[str]:
    """The eight steps for a call, with the arguments of `isogemm.doctor.diagnose`; yields lines."""
    call = {name: value for name, value in call.items() if name not in ("contract", "pairs")}  # of no step
    case, buffers = call_of([on_host(observed)], a, b, c, **call)
    seen = buffers[0]
    steps = (_shapes, _corners, _strict, _without_beta, _first_item, _by_hand, _strides, _offsets)
    for number, step in enumerate(steps, 1):
        words = (step.__doc__ or "").split(":")[0]
        yield f"{number}. {words}"
        yield from (f"   {line}" for line in step(case, seen))


def _wrong(case: GemmCall, seen: Array) -> str:
    at = case.c.positions().reshape(-1)
    count = int((~explained(seen[at], simulate(case, at))).sum())
    return f"{count} of {at.size} elements are wrong"


def _shapes(case: GemmCall, seen: Array) -> Iterator[str]:
    """Shapes: what op(A), op(B) and C are."""
    m, n, k = case.sizes
    yield f"op(A) {m} x {k}, op(B) {k} x {n}, C {m} x {n}, {case.items} of them; {case.out.name}: {_wrong(case, seen)}"


def _block(x: Array) -> Iterator[str]:
    for row in x[:4, :4]:
        yield " ".join(f"{value:12.5g}" for value in row)


def _corners(case: GemmCall, seen: Array) -> Iterator[str]:
    """The first 4 x 4 of each matrix: as the call reads them."""
    for name, x in (("op(A)", case.a), ("op(B)", case.b)):
        yield f"{name}:"
        yield from _block(x.values()[0])
    yield "C as it is, and as it should be:"
    at = case.c.positions()[0, :4, :4]
    yield from _block(seen[at].astype(np.float64))
    yield from _block(simulate(case, at.reshape(-1)).value.reshape(at.shape))


def _strict(case: GemmCall, seen: Array) -> Iterator[str]:
    """Strict products: whether operands of fewer digits explain it."""
    for name in ("tf32", "bfloat16", "float16"):
        yield f"with operands rounded to {name}: {_wrong(replace(case, rounded=name), seen)}"


def _without_beta(case: GemmCall, seen: Array) -> Iterator[str]:
    """Beta of 0: whether what was in C explains it."""
    yield f"with beta 0: {_wrong(replace(case, beta=0.0), seen)}"
    if case.before is not None:
        yield f"with beta 1: {_wrong(replace(case, beta=1.0), seen)}"


def _first_item(case: GemmCall, seen: Array) -> Iterator[str]:
    """One item: whether the first of the batch is right alone."""
    first = {name: replace(x, offsets=x.offsets[:1]) for name, x in (("a", case.a), ("b", case.b), ("c", case.c))}
    yield f"item 0 alone: {_wrong(replace(case, **first), seen)}"  # type: ignore[arg-type]


def _by_hand(case: GemmCall, seen: Array) -> Iterator[str]:
    """Two by two by hand: the four sums of the corner."""
    a, b = case.a.values()[0], case.b.values()[0]
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        if i < len(a) and j < b.shape[1]:
            terms = " + ".join(f"{x:.4g} * {y:.4g}" for x, y in zip(a[i, :3], b[:3, j], strict=True))
            held = float(seen[case.c.positions()[0, i, j]])
            yield f"[{i}, {j}] = {terms} + ... = {a[i] @ b[:, j]:.7g}; C holds {held:.7g}"


def _layout(name: str, x: StoredMatrix) -> str:
    lines, size = x.rows if x.by_rows else x.columns, x.ld * x.flat.itemsize
    slow = f", which {ALIGNED} does not divide: slow, not wrong" if size % ALIGNED else ""
    return (
        f"{name}: ld {x.ld}, {lines} stored lines: a matrix takes ld * lines = {x.ld * lines}; lines {size} bytes "
        f"apart{slow}"
    )


def _strides(case: GemmCall, seen: Array) -> Iterator[str]:
    """Strides: what a matrix takes, and what lies between two."""
    for name, x in (("A", case.a), ("B", case.b), ("C", case.c)):
        yield _layout(name, x) + (f"; the stride is {x.step}" if case.items > 1 else "")


def _offsets(case: GemmCall, seen: Array) -> Iterator[str]:
    """Offsets: base + i * stride of the first and the last item, in elements."""
    for name, x in (("A", case.a), ("B", case.b), ("C", case.c)):
        last = int(x.positions()[-1].max(initial=0))
        yield f"{name}: {x.offsets[0]} to {x.offsets[-1]}; the last element read or written is {last} of {x.flat.size}"
