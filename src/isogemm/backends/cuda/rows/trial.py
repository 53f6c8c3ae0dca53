"""Kernels along rows run on small operands and are compared with their formulas, bit by bit.

Rows hold all kinds of numbers, lie at steps of one and of four dimensions, and are as long as the code's registers and
chunks allow, and just longer than what they would waste; what lies between them is no number. A few rows repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ....base.dtypes import TYPES
from ....contract.reference import canonical
from ....contract.rows import OPERATIONS, chain, cross_entropy
from ....planner.bench import POISON, Bench, Buffer, Output, among_poison, beside, difference, words_of
from ....planner.family import Family
from ..driver.kernel import Bound
from .code import Code, RowsCase
from .sides import collapse, packed

Array = NDArray[Any]
EPS = 1e-5
KINDS = 24  # of rows
IGNORED = -100  # a class


class TriedRows(Family[RowsCase, Bound], Protocol):
    """A kernel, as its trial needs it."""

    rows: tuple[tuple[int, ...], tuple[int, ...]]

    def lengths(self, code: Code) -> tuple[int, ...]:
        """Of rows: what fills the code, and what just needs it."""
        ...


def try_code(bench: Bench, kernel: TriedRows, code: Code) -> str:
    """Run compiled code on operands of its kind: empty where every bit was right, else the first difference."""
    tries: dict[str, Callable[[_Trial], Iterator[tuple[str, str]]]] = {
        "rows": _reductions, "each": _elements, "rope": _rotations, "columns": _columns, "table": _tables,
    }  # fmt: skip
    for where, found in tries[code.function](_Trial(bench, kernel, code)):
        if found:
            return f"{where}: {found}"
    return ""


def dtype_of(kind: int) -> np.dtype[Any]:
    """NumPy's, by an element's code."""
    return TYPES[kind].dtype


class Rows(NamedTuple):
    """An operand: float32 values [rows, n], its buffer, address, and steps of the leading dimensions and along rows."""

    values: Array
    buffer: Buffer | None
    address: int
    steps: tuple[int, ...]
    column: int

    @property
    def row(self) -> Array | None:
        """The only row, of an operand that is there."""
        return self.values[0] if self.address else None


class _Trial(NamedTuple):
    """Code on a bench."""

    bench: Bench
    kernel: TriedRows
    code: Code

    def put(self, kind: int, values: Array, shape: Sequence[int], *, pad: int, column: int = 1) -> Rows:
        """Lay rows out among poison: the dimensions of `shape` in another order, `pad` more elements to each row."""
        if kind < 0:
            return Rows(values, None, 0, (0,) * len(shape), 1)
        n = values.shape[-1]
        with np.errstate(all="ignore"):
            narrow = values.astype(dtype_of(kind))
        order = (1, 0, 3, 2) if len(shape) == 4 else tuple(range(len(shape)))
        steps, room = [0] * len(shape), n * column + pad
        for i in reversed(order):
            steps[i], room = room, room * shape[i]
        begin = 0 if pad % 8 == 0 and column == 1 else 1
        flat, _ = among_poison(words_of(narrow).reshape(*shape, n), (*steps, column), begin)
        buffer = self.bench.machine.put(flat)
        return Rows(narrow.astype(np.float32), buffer, buffer.address + begin * narrow.itemsize, tuple(steps), column)

    def result(self, kind: int, count: int, held: Array | None = None) -> Output:
        """Poisoned memory for so many elements."""
        return self.bench.output((count,), dtype_of(kind).itemsize, held=held)

    def run(self, launch: Bound, *at: Rows | Output | Buffer | None) -> None:
        launch(self.bench.stream(), *[x.address for x in at if x is not None and x.address])

    def bind(self, kinds: Sequence[int], places: Sequence[bytes], columns: Sequence[int], count: int, n: int,
             eps: float = 0.0, *, start: bool = False) -> Bound:  # fmt: skip
        case = RowsCase(
            tuple(kinds), tuple(places), tuple(columns), count, n, eps, start, macros=dict(self.code.defines)
        )
        return self.kernel.bind(case, self.code, self.bench.device)

    def layouts(self) -> Iterator[tuple[int, int]]:
        """(elements between rows, step along a row) that the code takes."""
        yield 8, 1
        if not self.code.vec:
            yield 3, 2


def _compare(name: str, out: Output, kind: int, want: Array, *, any_nan: bool = False) -> str:
    """The first difference from values of float32, rounded here once, or what was written beside them."""
    with np.errstate(all="ignore"):
        rounded = canonical(want.reshape(-1).astype(dtype_of(kind)))
    found, stray = out.read()
    if any_nan:  # but not what was there before
        written = canonical(found.view(rounded.dtype)).view(found.dtype)
        found = np.where(found == POISON[found.itemsize], found, written)
    return difference(name, found, rounded) or beside(name, stray)


def _kinds(n: int) -> int:
    """How many rows differ: the more, the shorter they are. No multiple of 7."""
    return KINDS + 8 * min(13, 1 + 2**15 // max(n, 1))


def _drawn(seed: int, rows: int, n: int, special: bool = True) -> Array:
    """Rows of float32 whose sums depend on their order, and some with numbers that are tiny, infinite or none.

    A root or a rounding to 16 bits hides the last bits of a sum, so its order has to show in more than those: large
    elements swallow small ones that come later in their lane (squares, and the powers of softmax, which have no sign),
    or leave again halfway through the lane. Row i of seed 4 meets a row of seed 1 that lets its sums be seen.
    """
    random, count = np.random.default_rng([seed, n]), _kinds(n)
    x = random.standard_normal((count, n)).astype(np.float32)
    step = np.arange(n) // 128
    last = int(step[-1])
    for i in [*range(7, 11), *range(KINDS, count, 2)]:  # 4096**2 swallows what is below 1
        at = (0, last, last // 2, min(1, last))[i // 2 % 4]
        scale = 0.5 + (0.618 * i) % 0.5
        x[i] = scale * np.where(step == at, 4096, np.copysign(random.uniform(0.6, 0.99, n), x[i]))
    for i in [11, 12, 16, 23, *range(KINDS + 1, count, 2)]:  # exp: 1 swallows 2**-25
        at = (0, last, last // 2, min(1, last))[i // 2 % 4]
        if i < KINDS:  # the logarithm of 1 and little more
            x[i] = x[i] / 16 - 17.4
            x[i, (128 * at + 5 * i) % n] = 0
        else:
            x[i] = np.where(step == at, 17.4, x[i] / 16)
    x[15], x[17] = 1, -0.5
    for i in (18, 19, 20):
        large = 32768 * (np.sign(x[i]) if i == 20 else np.ones(n, np.float32))
        x[i] = np.where(step == 0, large, x[i] / 64) if last > 1 else x[i]
        if last > 1:
            half = step == (last + 1) // 2
            x[i, half] = -x[i, :128][: int(half.sum())]
    x[22] *= np.float32(2.0) ** random.integers(-20, 12, n).astype(np.float32)
    if special:
        x[0], x[1] = x[0] * np.float32(1e-40), x[1] * np.float32(1e25)
        x[2] = np.where(random.random(n) < 0.5, np.float32(-0.0), np.float32(0))
        x[3, n // 2], x[4, n - 1], x[5, n // 3], x[6] = np.nan, -np.inf, np.inf, -np.inf
    return x[(np.arange(rows) * 7 + seed) % count]


def _packed(shape: Sequence[int], operands: Sequence[Rows]) -> bytes:
    extents, steps = collapse(shape, [x.steps for x in operands])
    if len(shape) == 1 and len(extents) != 1:
        extents, steps = list(shape), [list(x.steps) for x in operands]
    return packed(prod(shape), extents, steps)


def _distinct(of: Callable[[int], Any], count: int, kinds: int) -> list[Any]:
    """`of` each row; rows that repeat are computed once."""
    first = [of(i) for i in range(min(count, kinds))]
    return [first[i % kinds] for i in range(count)]


def _reductions(trial: _Trial) -> Iterator[tuple[str, str]]:
    shape = trial.kernel.rows[trial.code.dims > 1]
    known: dict[int, list[Any]] = {}
    one = _loss if OPERATIONS[trial.code.operation].kernels == "loss" else _reduction
    for n in trial.kernel.lengths(trial.code):
        for pad, column in trial.layouts():
            yield f"{list(shape)} rows of {n}", one(trial, shape, n, pad, column, known)


def _reduction(
    trial: _Trial, shape: tuple[int, ...], n: int, pad: int, column: int, known: dict[int, list[Any]]
) -> str:
    """Of one layout; `known` keeps what rows of a length have to give."""
    code, count, operation = trial.code, prod(shape), OPERATIONS[trial.code.operation]
    eps = EPS if "eps" in operation.options else 0.0
    x = trial.put(code.tx, _drawn(1, count, n), shape, pad=pad, column=column)
    g = trial.put(code.tg, _drawn(4, count, n), shape, pad=pad + 8, column=column)
    w = trial.put(code.tw, _drawn(2, 1, n, False), (1,), pad=pad, column=column)
    b = trial.put(code.tb, _drawn(3, 1, n, False), (1,), pad=pad, column=column)
    like = {"x": code.to, "residual": code.tg, None: 0}
    second = [(n if r.width is None else r.width, like[r.like]) for r in operation.results[1:]]
    out = trial.result(code.to, count * (operation.results[0].width or n))
    more = [trial.result(kind, count * width) for width, kind in second]
    kinds = (code.tx, code.tg, code.tw, code.tb, code.to, *(kind for _, kind in second), -1)[:6]
    launch = trial.bind(
        kinds, [_packed(shape, [x, g] if code.tg >= 0 else [x])], [t.column for t in (x, g, w, b)], count, n, eps
    )
    trial.run(launch, x, g, w, b, out, *more)

    def of(i: int) -> Any:
        rows = {"weight": w.row, "bias": b.row, "x": x.values[i]}
        operands = [rows.get(o.name, g.values[i] if o.extent == "rows" else None) for o in operation.operands]
        return operation.results_of(*operands, eps=eps, dtype=dtype_of(max(code.tg, 0)))

    found = known.get(n) or known.setdefault(n, _distinct(of, count, _kinds(n)))
    wrong = _compare("out", out, code.to, np.concatenate([y[0] for y in found]))
    for result, (width, kind) in zip(more, second, strict=True):
        values = np.concatenate([np.asarray(y[1], np.float32) for y in found])
        wrong = wrong or _compare("second", result, kind, values, any_nan=width != n)
    return wrong


def _loss(trial: _Trial, shape: tuple[int, ...], n: int, pad: int, column: int, known: dict[int, list[Any]]) -> str:
    """Of rows with classes, of which some have none; a gradient is given what the formula says of each row."""
    code, count, kinds = trial.code, prod(shape), _kinds(n)
    x = trial.put(code.tx, _drawn(1, count, n), shape, pad=pad, column=column)
    dy = trial.put(code.tg, _drawn(4, count, n, False)[:, :1], shape, pad=pad)
    i = np.arange(count) % kinds
    classes = np.where(i % 5 == 4, IGNORED, i * 7 % n)
    target = trial.bench.machine.put(classes.astype(np.int64).view(np.uint64))
    steps = tuple(2 * prod(shape[d + 1 :]) for d in range(len(shape)))
    at = Rows(classes, target, target.address, steps, 1)
    losses, sums = map(
        np.array, zip(*_distinct(lambda i: cross_entropy(x.values[i], classes[i]), count, kinds), strict=True)
    )
    back = code.tg >= 0
    out, second = trial.result(code.to, count * (n if back else 1)), None if back else trial.result(0, 2 * count)
    given = trial.bench.machine.put(sums.astype(np.float32).view(np.uint32)) if back else None
    launch = trial.bind(
        (code.tx, code.tg, 0, 0 if back else -1, code.to, -1 if back else 0), [_packed(shape, [x, dy, at])],
        (x.column, 1, 1, IGNORED), count, n,
    )  # fmt: skip
    trial.run(launch, x, dy, at, given, out, second)
    if second is not None:
        return _compare("out", out, code.to, losses) or _compare("second", second, 0, sums)
    formula = OPERATIONS[code.operation].formula
    want = known.get(n) or known.setdefault(
        n, _distinct(lambda i: formula(x.values[i], dy.values[i], classes[i], sums[i]), count, kinds)
    )
    return _compare("out", out, code.to, np.concatenate(want))


def _elements(trial: _Trial) -> Iterator[tuple[str, str]]:
    code, operation = trial.code, OPERATIONS[trial.code.operation]
    for shape in [trial.kernel.rows[code.dims > 1]] + ([()] if code.dims == 1 else []):
        for pad, column in trial.layouts():
            n = (8 * 37 if shape else 8 * 1001) if code.vec else (131 if shape else 4003)
            count = prod(shape)
            every = [
                trial.put(k, _drawn(seed, count, n), shape, pad=pad + 8 * seed, column=column)
                for seed, k in ((1, code.tx), (4, code.tg), (6, code.td))
            ]
            outs = (code.tx, code.tg) if len(operation.results) > 1 else (code.to,)
            made = [trial.result(k, count * n) for k in outs]
            place = _packed(shape, every) if shape else packed(1, [], [[], [], []])
            kinds = (code.tx, code.tg, code.td, *outs, -1)[:5]
            trial.run(trial.bind(kinds, [place], [t.column for t in every], count, n), *every, *made)
            want = operation.results_of(*(t.values for t in every[: len(operation.operands)]))
            for name, got, kind, values in zip(("out", "second"), made, outs, want, strict=False):
                yield f"{list(shape)} rows of {n}", _compare(name, got, kind, np.asarray(values))


def _rotations(trial: _Trial) -> Iterator[tuple[str, str]]:
    code = trial.code
    if code.norm:
        top = 128 * code.h
        lengths = (
            [top, top - 8] if code.vec and (code.angles or code.interleaved) else [top - 4] if code.vec else [top - 2]
        )
    else:
        lengths = [128, 48] if code.vec else [2, 46]
    for n in lengths:
        for pad, column in trial.layouts():
            yield f"rows of {n}", _rotation(trial, n, pad, column)


def _rotation(trial: _Trial, n: int, pad: int, column: int) -> str:
    """Two tensors, the second with fewer heads; tables that heads and entries share."""
    code, half = trial.code, n // 2
    operation = OPERATIONS["norm_rope" if code.norm else "rope"]
    many = 2 * code.each * code.teams + 27 if code.norm else 31
    shapes = [(many,), (many - 2,)] if code.dims == 1 else [(2, 3, 1, 7), (2, 1, 1, 7)]
    tokens = shapes[0][-1]
    tables = [trial.put(k, _drawn(seed, tokens, half, False), (tokens,), pad=pad, column=column)
              for seed, k in ((2, code.tc), (3, code.ts))]  # fmt: skip
    xs, ws, outs, places = [], [], [], []
    for i, shape in enumerate(shapes):
        count = prod(shape)
        xs.append(trial.put(code.tx, _drawn(1 + 4 * i, count, n), shape, pad=pad, column=column))
        ws.append(trial.put(code.tw, _drawn(5 + i, 1, n, False), (1,), pad=pad, column=column))
        outs.append(trial.result(code.to, count * n))
        spread = [t._replace(steps=(*(0,) * (len(shape) - 1), t.steps[0])) for t in tables]
        places.append(_packed(shape, [xs[i], *spread]))
    eps = EPS if code.norm else 0.0
    kinds = (0, 0, 0, 0, code.tw, code.tw, 0, 0)
    columns = [t.column for t in (*xs, *tables, *ws)]
    launch = trial.bind(kinds, places, columns, max(len(x.values) for x in xs), half, eps)
    trial.run(launch, *xs, *tables, *ws, *outs)
    options = {"eps": eps, "interleaved": bool(code.interleaved), "dtype": dtype_of(code.tx)}
    for name, x, w, out in zip(("out 0", "out 1"), xs, ws, outs, strict=True):
        want: list[Array] = []
        for i, row in enumerate(x.values):
            angles = [t.values[i % tokens] for t in tables]
            want += operation.results_of(row, *angles, *([w.row] if code.norm else []), **options)
        wrong = _compare(name, out, code.to, np.concatenate(want))
        if wrong:
            return wrong
    return ""


def _columns(trial: _Trial) -> Iterator[tuple[str, str]]:
    for shape in [(1200,), (3,)] if trial.code.dims == 1 else [(4, 5, 12, 5)]:
        for pad, column in trial.layouts():
            for start in (False, True) if trial.code.to == 0 else (False,):
                yield f"{list(shape)} rows", _column(trial, shape, pad, column, start)


def _column(trial: _Trial, shape: tuple[int, ...], pad: int, column: int, start: bool) -> str:
    """The sums from +0 have three leaves."""
    code = trial.code
    n, count = 72 if code.vec else 71, prod(shape)
    leaf = count if start else -(-count * 2 // 5)
    random = np.random.default_rng(count)
    x = trial.put(code.tx, _drawn(1, count, n, False), shape, pad=pad, column=column)
    d = trial.put(code.td, _drawn(4, count, n, False), shape, pad=pad, column=column)
    stats = random.standard_normal((count, 2)).astype(np.float32)
    held = random.standard_normal(n).astype(np.float32) if start else None
    leaves = range(0, count, leaf)
    out, rows = trial.result(code.to, n * len(leaves), held), trial.bench.put(stats)
    assert rows is not None
    place = _packed(shape, [x if code.tx >= 0 else d._replace(steps=(0,) * len(shape)), d])
    launch = trial.bind((0,) * 4, [place], (x.column, d.column, 1, leaf), count, n, start=start)
    launch(trial.bench.stream(), x.address if code.term else 0, d.address, rows.address, out.address)
    terms = d.values
    if code.term:
        moved = x.values - stats[:, 1:] if code.term == 2 else x.values
        terms = d.values * (moved * stats[:, :1])
    begun = np.zeros(n, np.float32) if held is None else held
    return _compare("out", out, code.to, np.concatenate([chain(terms[i : i + leaf], begun) for i in leaves]))


def _tables(trial: _Trial) -> Iterator[tuple[str, str]]:
    code, shape = trial.code, (37,) if trial.code.dims == 1 else trial.kernel.rows[1]
    count, height = prod(shape), 9
    random = np.random.default_rng(count)
    ids = np.where(random.random(count) < 0.5, 4, random.integers(0, height - 1, count))
    order = np.argsort(ids, kind="stable")
    named, places = (trial.bench.machine.put(a.astype(np.int64).view(np.uint64)) for a in (ids[order], order))
    for n in (136, 5):
        for start in (False, True) if code.to == 0 else (False,):
            d = trial.put(code.td, _drawn(1, count, n, False), shape, pad=3)
            held = random.standard_normal(height * n).astype(np.float32)
            begun = held if start else np.zeros_like(held)
            kept = canonical(held.astype(dtype_of(code.to)))
            out = trial.result(code.to, height * n, kept)
            launch = trial.bind((0,) * 4, [_packed(shape, [d])], (d.column, n, 1, height), count, n, start=start)
            launch(trial.bench.stream(), named.address, places.address, d.address, out.address)
            want = kept.astype(np.float32).reshape(height, n)
            for i in set(ids.tolist()):
                want[i] = chain(d.values[ids == i], begun.reshape(height, n)[i])
            yield f"{list(shape)} rows of {n}", _compare("out", out, code.to, want)
